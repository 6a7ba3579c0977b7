//! Failures on demand: `SIMCUDA_FAIL`, or `simcudaSetFail` while the program runs.
//!
//! A rule names a function with or without its suffix: `cuMemAlloc` also means `cuMemAlloc_v2`, `cuStreamQuery` also
//! `cuStreamQuery_ptsz`.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::codes::OUT_OF_MEMORY;

struct Rule {
    name: String,
    /// The call that fails, counted from 1.
    nth: u64,
    /// Whether every nth call fails, not only that one.
    every: bool,
    code: u32,
    seen: u64,
}

static RULES: Mutex<Vec<Rule>> = Mutex::new(Vec::new());
/// Whether there are rules at all: the usual case is that there are none.
static ARMED: AtomicBool = AtomicBool::new(false);

/// Replaces all rules. Returns false, and changes nothing, when the text cannot be read.
pub fn set(text: &str) -> bool {
    let Some(rules) = text.split(',').map(str::trim).filter(|t| !t.is_empty()).map(parse).collect::<Option<Vec<_>>>()
    else {
        return false;
    };
    ARMED.store(!rules.is_empty(), Ordering::Release);
    *RULES.lock() = rules;
    true
}

pub fn read_environment() {
    if let Ok(text) = std::env::var("SIMCUDA_FAIL")
        && !set(&text)
    {
        eprintln!("simcuda: SIMCUDA_FAIL={text} cannot be read");
        std::process::abort();
    }
}

fn parse(text: &str) -> Option<Rule> {
    let mut parts = text.split(':');
    let name = parts.next()?.to_string();
    let mut next = parts.next()?;
    let every = next == "every";
    if every {
        next = parts.next()?;
    }
    let nth = next.parse().ok().filter(|&n| n > 0)?;
    let code = match parts.next() {
        Some(code) => code.parse().ok()?,
        None => OUT_OF_MEMORY.0,
    };
    parts.next().is_none().then_some(Rule { name, nth, every, code, seen: 0 })
}

/// Counts a call of `name`; the code it is to fail with, if it is.
pub fn due(name: &str) -> Option<u32> {
    if !ARMED.load(Ordering::Acquire) {
        return None;
    }
    let mut failed = None;
    for rule in RULES.lock().iter_mut().filter(|rule| names(&rule.name, name)) {
        rule.seen += 1;
        if rule.seen == rule.nth || (rule.every && rule.seen.is_multiple_of(rule.nth)) {
            failed = failed.or(Some(rule.code));
        }
    }
    failed
}

/// Whether `asked` names the exported function `name`.
pub fn names(asked: &str, name: &str) -> bool {
    let plain = name.strip_suffix("_ptsz").or_else(|| name.strip_suffix("_ptds")).unwrap_or(name);
    let base = match plain.rsplit_once("_v") {
        Some((base, digits)) if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) => base,
        _ => plain,
    };
    asked == name || asked == plain || asked == base
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_and_without_suffix() {
        assert!(names("cuMemAlloc", "cuMemAlloc_v2"));
        assert!(names("cuMemAlloc_v2", "cuMemAlloc_v2"));
        assert!(names("cuMemcpyHtoD", "cuMemcpyHtoD_v2_ptds"));
        assert!(!names("cuMemAlloc", "cuMemAllocAsync"));
    }

    #[test]
    fn rules_are_read() {
        let rule = parse("cuMemCreate:3").unwrap();
        assert_eq!((rule.nth, rule.every, rule.code), (3, false, 2));
        let rule = parse("cuMemCreate:every:5:700").unwrap();
        assert_eq!((rule.nth, rule.every, rule.code), (5, true, 700));
        assert!(
            parse("cuMemCreate").is_none() && parse("cuMemCreate:0").is_none() && parse("cuMemCreate:1:2:3").is_none()
        );
    }
}
