//! Every setting, in one table: name, type, default, meaning. The README's table is checked against it by a test.
//!
//! The library and the gpupool command both compile this file, which therefore uses no other of theirs: what a variable takes, an
//! option takes too.

use std::ffi::OsString;

use log::LevelFilter;

/// One line of the table.
pub struct Setting {
    pub name: &'static str,
    pub kind: &'static str,
    pub default: &'static str,
    #[allow(dead_code)] // for the README's table
    pub meaning: &'static str,
}

const fn opt(name: &'static str, kind: &'static str, default: &'static str, meaning: &'static str) -> Setting {
    Setting { name, kind, default, meaning }
}

/// Sizes take a suffix: `512`, `64k`, `1m`, `12g` (powers of 1024).
#[rustfmt::skip]
pub const SETTINGS: &[Setting] = &[
    opt("GPUPOOL_BIN_GROWTH", "integer, 2 to 64", "2", "factor between the powers of the bins"),
    opt("GPUPOOL_BIN_STEPS", "integer, 1 to 64", "8", "bins from one power to the next; 1 is CUB's own behaviour"),
    opt("GPUPOOL_BIN_MIN", "size, over 0", "512", "the smallest bin"),
    opt("GPUPOOL_BIN_MAX", "size, to 1t", "1m", "larger requests are not binned: they keep their size to 512 bytes"),
    opt("GPUPOOL_MAX_CACHED", "size", "a quarter of the live peak, 32m at least", "how much the bins of one context may keep"),
    opt("GPUPOOL_INIT_PERCENT", "number, over 0 to 99", "10", "what `cnmemInit` takes of the device for size 0"),
    opt("GPUPOOL_INIT_SHRINK", "number, over 0 under 1", "off", "`cnmemInit` retries a size that cannot be had, each time this much of it"),
    opt("GPUPOOL_BACKING", "`vmm` or `malloc`", "vmm", "memory in pages, or whole `cuMemAlloc` blocks; without VMM it is always the latter"),
    opt("GPUPOOL_MAX_MEM", "size, over 0", "no limit", "this process's share of each device: what would pass it is out of memory"),
    opt("GPUPOOL_MAX_MEM_PERCENT", "number, over 0 to 100", "no limit", "the same, in percent of the device; the smaller holds"),
    opt("GPUPOOL_SLACK", "number, 0 to 1000", "42", "percent of the live peak that may lie idle before idle pages are moved to where they are needed, at most"),
    opt("GPUPOOL_DECAY_MS", "milliseconds, or `off`", "500", "memory that was idle for this long goes back to the driver"),
    opt("GPUPOOL_INTERPOSE", "`0` or `1`", "1 when preloaded", "whether CUDA's own allocation calls are served"),
    opt("GPUPOOL_FREE", "`order`, `barrier` or `sync`", "order", "what a cudaFree orders: the memory alone; all later work after it; the host too"),
    opt("GPUPOOL_PINNED", "size", "256m", "how much freed pinned host memory is kept; 0: none, and its calls go to the driver"),
    opt("GPUPOOL_REPORT", "`0` or `1`", "0", "a report on standard error at exit"),
    opt("GPUPOOL_LOG", "`off`, `error`, `warn`, `info`, `debug` or `trace`", "off", "messages on standard error"),
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backing {
    Vmm,
    Malloc,
}

/// How memory is ordered that was freed by a call without a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FreeMode {
    Order,
    Barrier,
    Sync,
}

/// The settings, parsed. Sizes in bytes.
#[derive(Clone, Debug)]
pub struct Config {
    pub bin_growth: u32,
    pub bin_steps: u32,
    pub bin_min: usize,
    pub bin_max: usize,
    pub max_cached: Option<usize>,
    pub init_percent: f64,
    pub init_shrink: Option<f64>,
    pub backing: Backing,
    pub max_mem: Option<usize>,
    pub max_mem_percent: Option<f64>,
    /// A share of the live peak.
    pub slack: f64,
    pub decay_ms: Option<u64>,
    pub interpose: Option<bool>,
    pub free: FreeMode,
    pub pinned: usize,
    pub report: bool,
    pub log: LevelFilter,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            bin_growth: 2,
            bin_steps: 8,
            bin_min: 512,
            bin_max: 1 << 20,
            max_cached: None,
            init_percent: 10.0,
            init_shrink: None,
            backing: Backing::Vmm,
            max_mem: None,
            max_mem_percent: None,
            slack: 0.42,
            decay_ms: Some(500),
            interpose: None,
            free: FreeMode::Order,
            pinned: 256 << 20,
            report: false,
            log: LevelFilter::Off,
        }
    }
}

/// The `GPUPOOL_` variables of this process. Text that is not UTF-8 is a bad value like any other, and is told of as such.
pub fn environment() -> Vec<(String, String)> {
    let text = |t: OsString| t.to_string_lossy().into_owned();
    let ours = std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(PREFIX.as_bytes()));
    ours.map(|(name, value)| (text(name), text(value))).collect()
}

/// The settings among `variables`; the second part says what was wrong with the others.
pub fn parse(variables: &[(String, String)]) -> (Config, Vec<String>) {
    let mut config = Config::default();
    let mut warnings = Vec::new();
    for setting in SETTINGS {
        let value = variables.iter().find(|(name, _)| name == setting.name).map(|(_, value)| value);
        let Some(text) = value.filter(|t| !t.is_empty()) else { continue };
        if set(&mut config, setting.name, text.trim()).is_none() {
            let Setting { name, default, .. } = setting;
            let wanted = setting.wanted();
            warnings.push(format!("{name}={text} is not taken; wanted: {wanted}; the default stays: {default}"));
        }
    }
    if config.bin_min > config.bin_max {
        warnings.push("GPUPOOL_BIN_MIN is larger than GPUPOOL_BIN_MAX; no size is binned".into());
    }
    (config, warnings)
}

impl Setting {
    /// The values that it takes, in words.
    pub fn wanted(&self) -> String {
        let plain = self.kind.replace('`', "");
        match plain.strip_prefix("size") {
            Some(bounds) => format!("a size{bounds}: bytes, or with k, m, g or t, as 512m or 12GiB"),
            None if plain.starts_with("number") => format!("a {plain}"),
            None if plain.starts_with("integer") => format!("an {plain}"),
            None => plain,
        }
    }
}

// ---- names that are no setting's ----

const PREFIX: &str = "GPUPOOL_";
/// The command's own; the library is loaded by then.
const OF_COMMAND: &str = "GPUPOOL_LIBRARY";

/// A name among `variables` that is no setting's, and the setting's that it may stand for.
pub struct Unknown<'a> {
    pub name: &'a str,
    pub nearest: Option<&'static str>,
}

pub fn unknown(variables: &[(String, String)]) -> Vec<Unknown<'_>> {
    let known = || SETTINGS.iter().map(|s| s.name).chain([OF_COMMAND]);
    let names = variables.iter().map(|v| v.0.as_str()).filter(|name| !known().any(|k| k == *name));
    names.map(|name| Unknown { name, nearest: nearest(name, known()) }).collect()
}

/// One line for each name that is nearly a setting's. Of others nothing is said: a program may have variables that begin so.
pub fn misspelt(variables: &[(String, String)]) -> Vec<String> {
    let near = unknown(variables).into_iter().filter_map(|u| Some((u.name, u.nearest?)));
    near.map(|(name, known)| format!("{name} is no setting and has no effect; is {known} meant?")).collect()
}

/// The name of `known` with the fewest letters to change, if that is at most a third of them.
fn nearest(name: &str, known: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    const LONGEST: usize = 40;
    let letters = |name: &str| -> Vec<u8> {
        let upper = name.bytes().skip(PREFIX.len()).filter(|b| *b != b'_').map(|b| b.to_ascii_uppercase());
        upper.take(LONGEST).collect()
    };
    let asked = letters(name);
    let distances = known.map(|known| {
        let letters = letters(known);
        (distance(&asked, &letters), letters.len().max(asked.len()), known)
    });
    distances.filter(|(d, len, _)| d * 3 <= *len).min_by_key(|(d, ..)| *d).map(|(.., known)| known)
}

/// Letters to add, drop or replace, or neighbours to swap, that make one of the other.
fn distance(a: &[u8], b: &[u8]) -> usize {
    // The two rows before the one being filled.
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let replaced = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = replaced.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

// ---- values ----

/// Whether the setting `name` takes `text`; else what it takes.
#[allow(dead_code)] // the command's
pub fn check(name: &str, text: &str) -> Result<(), String> {
    let setting = SETTINGS.iter().find(|s| s.name == name).expect("the name of a setting");
    set(&mut Config::default(), name, text.trim()).ok_or_else(|| format!("wanted: {}", setting.wanted()))
}

fn set(c: &mut Config, name: &str, text: &str) -> Option<()> {
    let within = |lo: u32, hi: u32| text.parse::<u32>().ok().filter(|v| (lo..=hi).contains(v));
    let number = || text.parse::<f64>().ok().filter(|v| v.is_finite());
    match name {
        "GPUPOOL_BIN_GROWTH" => c.bin_growth = within(2, 64)?,
        "GPUPOOL_BIN_STEPS" => c.bin_steps = within(1, 64)?,
        "GPUPOOL_BIN_MIN" => c.bin_min = size(text).filter(|&s| s > 0)?,
        "GPUPOOL_BIN_MAX" => c.bin_max = size(text).filter(|&s| s <= 1 << 40)?,
        "GPUPOOL_MAX_CACHED" => c.max_cached = Some(size(text)?),
        "GPUPOOL_INIT_PERCENT" => c.init_percent = number().filter(|&v| v > 0.0 && v <= 99.0)?,
        "GPUPOOL_INIT_SHRINK" if text.eq_ignore_ascii_case("off") => c.init_shrink = None,
        "GPUPOOL_INIT_SHRINK" => c.init_shrink = Some(number().filter(|&v| v > 0.0 && v < 1.0)?),
        "GPUPOOL_BACKING" => {
            c.backing = match text {
                "vmm" => Backing::Vmm,
                "malloc" => Backing::Malloc,
                _ => return None,
            }
        }
        "GPUPOOL_MAX_MEM" => c.max_mem = Some(size(text).filter(|&s| s > 0)?),
        "GPUPOOL_MAX_MEM_PERCENT" => c.max_mem_percent = Some(number().filter(|&v| v > 0.0 && v <= 100.0)?),
        "GPUPOOL_SLACK" => c.slack = number().filter(|v| (0.0..=1000.0).contains(v))? / 100.0,
        "GPUPOOL_DECAY_MS" if text.eq_ignore_ascii_case("off") => c.decay_ms = None,
        "GPUPOOL_DECAY_MS" => c.decay_ms = Some(text.parse::<u32>().ok()?.into()),
        "GPUPOOL_INTERPOSE" => c.interpose = Some(flag(text)?),
        "GPUPOOL_FREE" => {
            c.free = match text {
                "order" => FreeMode::Order,
                "barrier" => FreeMode::Barrier,
                "sync" => FreeMode::Sync,
                _ => return None,
            }
        }
        "GPUPOOL_PINNED" => c.pinned = size(text)?,
        "GPUPOOL_REPORT" => c.report = flag(text)?,
        "GPUPOOL_LOG" => c.log = text.parse().ok()?,
        _ => unreachable!("a setting without a parser: {name}"),
    }
    Some(())
}

fn flag(text: &str) -> Option<bool> {
    match text {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

/// `12g`, `64K`, `512`: bytes.
fn size(text: &str) -> Option<usize> {
    let text = text.to_ascii_lowercase();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return None,
    };
    digits.parse::<usize>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }

    fn with(pairs: &[(&str, &str)]) -> (Config, Vec<String>) {
        parse(&variables(pairs))
    }

    #[test]
    fn good_values_are_taken() {
        let (c, w) = with(&[
            ("GPUPOOL_BIN_GROWTH", "8"),
            ("GPUPOOL_BIN_STEPS", "1"),
            ("GPUPOOL_BIN_MIN", "4k"),
            ("GPUPOOL_BIN_MAX", "2MiB"),
            ("GPUPOOL_MAX_CACHED", "12g"),
            ("GPUPOOL_INIT_PERCENT", "95"),
            ("GPUPOOL_INIT_SHRINK", "0.75"),
            ("GPUPOOL_BACKING", "malloc"),
            ("GPUPOOL_LOG", "debug"),
        ]);
        assert!(w.is_empty(), "{w:?}");
        assert_eq!((c.bin_growth, c.bin_steps, c.bin_min, c.bin_max), (8, 1, 4096, 2 << 20));
        assert_eq!((c.max_cached, c.init_percent, c.init_shrink), (Some(12 << 30), 95.0, Some(0.75)));
        assert_eq!((c.backing, c.log), (Backing::Malloc, LevelFilter::Debug));
    }

    #[test]
    fn bad_values_warn_once_each_and_keep_the_default() {
        for s in SETTINGS {
            for bad in ["nonsense", "-1", "1e99x", "99999999999999999999g"] {
                let (c, w) = with(&[(s.name, bad)]);
                assert_eq!(w.len(), 1, "{}={bad}", s.name);
                assert!(w[0].contains(s.name) && w[0].contains(bad));
                assert_eq!(format!("{c:?}"), format!("{:?}", Config::default()));
            }
        }
        assert!(with(&[("GPUPOOL_BIN_GROWTH", "")]).1.is_empty(), "an empty value is no value");
    }

    #[test]
    fn a_warning_names_the_forms_that_are_taken() {
        let wanted = |name, bad| with(&[(name, bad)]).1.remove(0);
        let size = wanted("GPUPOOL_MAX_MEM", "12x");
        assert!(size.contains("over 0: bytes, or with k, m, g or t, as 512m or 12GiB"), "{size}");
        assert!(wanted("GPUPOOL_FREE", "foo").contains("wanted: order, barrier or sync;"));
        assert!(wanted("GPUPOOL_MAX_MEM_PERCENT", "101").contains("over 0 to 100"));
        for s in SETTINGS {
            assert_eq!(check(s.name, "nonsense"), Err(format!("wanted: {}", s.wanted())));
        }
        for good in ["1", "64k", "512M", "12g", "2t", "12GiB", "3kb", " 7m "] {
            assert_eq!(
                (check("GPUPOOL_MAX_MEM", good), with(&[("GPUPOOL_MAX_MEM", good)]).1),
                (Ok(()), vec![]),
                "{good}"
            );
        }
    }

    #[test]
    fn a_misspelt_name_is_told_of_with_the_setting_that_is_near() {
        for (name, meant) in [
            ("GPUPOOL_MAXMEM", "GPUPOOL_MAX_MEM"),
            ("GPUPOOL_MAX_MEMORY", "GPUPOOL_MAX_MEM"),
            ("GPUPOOL_MAX_PERCENT", "GPUPOOL_MAX_MEM_PERCENT"),
            ("GPUPOOL_max_mem", "GPUPOOL_MAX_MEM"),
            ("GPUPOOL_LGO", "GPUPOOL_LOG"),
            ("GPUPOOL_FREES", "GPUPOOL_FREE"),
            ("GPUPOOL_DECAY", "GPUPOOL_DECAY_MS"),
            ("GPUPOOL_REPROT", "GPUPOOL_REPORT"),
            ("GPUPOOL_LIBRAY", "GPUPOOL_LIBRARY"),
        ] {
            let all = variables(&[(name, "1"), ("GPUPOOL_FREE", "sync")]);
            assert_eq!(misspelt(&all), [format!("{name} is no setting and has no effect; is {meant} meant?")]);
        }
        // Every setting's own name, and what is near to none.
        let known: Vec<_> = SETTINGS.iter().map(|s| (s.name, "1")).chain([("GPUPOOL_LIBRARY", "x")]).collect();
        assert!(unknown(&variables(&known)).is_empty());
        for far in
            ["GPUPOOL_STRESS_OPS", "GPUPOOL_SO", "GPUPOOL_", "GPUPOOL_HOME", "GPUPOOL_LAG5", &"GPUPOOL_".repeat(99)]
        {
            let all = variables(&[(far, "1")]);
            assert!(misspelt(&all).is_empty(), "{far}");
            assert_eq!(unknown(&all).len(), 1);
        }
    }
}
