//! The panic guard: nothing unwinds into C.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs the body of an exported function. A panic is logged and answered with `on_panic`.
#[inline]
pub fn guard<R>(on_panic: R, body: impl FnOnce() -> R) -> R {
    // Unwind safety: state shared with later calls is behind locks that do not poison, and the pool's invariants hold
    // between its operations, each of which changes the books only after what can fail has succeeded.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(r) => r,
        Err(cause) => {
            let text =
                cause.downcast_ref::<&str>().copied().or_else(|| cause.downcast_ref::<String>().map(String::as_str));
            log::error!("internal error: {}", text.unwrap_or("a panic without a message"));
            on_panic
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_panic_becomes_an_answer() {
        assert_eq!(super::guard(7, || 3), 3);
        assert_eq!(super::guard(7, || panic!("on purpose")), 7);
    }
}
