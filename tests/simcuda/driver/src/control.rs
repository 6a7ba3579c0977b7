//! The `simcuda...` functions: how tests steer the driver while a program runs.

use std::ffi::{CStr, c_char, c_int};

use crate::state::state;
use crate::{call, engine, fault};

/// # Safety
/// `text` is NULL or a C string.
unsafe fn text<'a>(text: *const c_char) -> &'a str {
    if text.is_null() {
        return "";
    }
    // SAFETY: passed on to the caller.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("")
}

/// Replaces the rules of `SIMCUDA_FAIL`; NULL or "" removes them. 1, and no change, when they cannot be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simcudaSetFail(rules: *const c_char) -> c_int {
    // SAFETY: the caller passes NULL or a C string.
    !fault::set(unsafe { text(rules) }) as c_int
}

/// As `SIMCUDA_DELAY_US`.
#[unsafe(no_mangle)]
pub extern "C" fn simcudaSetDelay(microseconds: u32) {
    engine::set_delay(microseconds);
}

/// Calls of a function, with or without its suffixes, since the start or the last reset.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simcudaCallCount(name: *const c_char) -> u64 {
    // SAFETY: the caller passes NULL or a C string.
    call::count(unsafe { text(name) })
}

/// Forgets faults, delay and call counts. Devices, memory and streams stay as they are.
#[unsafe(no_mangle)]
pub extern "C" fn simcudaReset() {
    fault::set("");
    engine::set_delay(0);
    call::reset_counts();
}

/// How many there are alive of "contexts", "streams", "events", "allocations" (device, managed and pinned), "reservations",
/// "handles", "mappings"; -1 for another word.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simcudaLive(kind: *const c_char) -> i64 {
    let st = state();
    // SAFETY: the caller passes NULL or a C string.
    let count = match unsafe { text(kind) } {
        "contexts" => st.contexts.iter().count(),
        "streams" => st.streams.iter().count(),
        "events" => st.events.iter().count(),
        "allocations" => st.allocations.len(),
        "reservations" => st.vmm.reservations.len(),
        "handles" => st.vmm.handles.len(),
        "mappings" => st.vmm.mappings.len(),
        _ => return -1,
    };
    count as i64
}
