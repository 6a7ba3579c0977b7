//! The runtime door: the fast path alone. Anything unusual goes to the real runtime, which comes back through the driver door: so the
//! runtime's own error state, and its lazy making of contexts, are always right.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::AtomicUsize;

use super::hooks::{self, hooks};
use super::memory;
use crate::driver;
use crate::registry;
use crate::stats;

type Raw = *mut c_void;

/// Whether the current context is of the device that the runtime would allocate on.
fn settled() -> bool {
    static GET_DEVICE: AtomicUsize = AtomicUsize::new(0);
    let Some(d) = driver::present() else { return false };
    let (Some(get), Ok(device)) = (hooks::real(&GET_DEVICE, c"cudaGetDevice"), d.ctx_device()) else { return false };
    // SAFETY: the runtime's function, whose signature this is.
    let get: unsafe extern "C" fn(*mut c_int) -> u32 = unsafe { std::mem::transmute(get) };
    let mut chosen = -1;
    // SAFETY: the pointer is to a live int.
    (unsafe { get(&mut chosen) }) == 0 && chosen == device
}

hooks! {
    table TABLE;
    fn [cudaMalloc] (out: *mut Raw, size: usize) = |real, _name| {
        if out.is_null() || size == 0 || !settled() {
            stats::count(&stats::RUNTIME.foreign_mallocs);
            return real(out, size);
        }
        match memory::allocate(size, &stats::RUNTIME) {
            // SAFETY: not NULL; the caller's to be written.
            Some(Ok(p)) => unsafe { out.write(p as Raw); 0 },
            _ => real(out, size),
        }
    };
    fn [cudaFree] (p: Raw) = |real, _name| {
        // In a capture the driver door knows what is allowed, and the runtime keeps the error.
        if crate::pool::fence::capturing() {
            return real(p);
        }
        let answer = memory::free(p as u64, &stats::RUNTIME, |pool| registry::free_everyone_in(pool, p as u64));
        if answer == Some(0) { 0 } else { real(p) }
    };
    fn [cudaMallocHost] (out: *mut Raw, size: usize) = |real, _name| {
        if crate::pinned::take(out, size, 0) { 0 } else { real(out, size) }
    };
    fn [cudaHostAlloc] (out: *mut Raw, size: usize, flags: c_uint) = |real, _name| {
        if crate::pinned::take(out, size, flags) { 0 } else { real(out, size, flags) }
    };
    fn [cudaFreeHost] (p: Raw) = |real, _name| {
        if crate::pinned::keep(p as usize) { 0 } else { real(p) }
    };
}
