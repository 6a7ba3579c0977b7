//! The gpupool door: the pool's own C interface (`include/gpupool.h`).

// The names are the interface's own.
#![allow(non_snake_case)]

use std::ffi::{c_char, c_int, c_void};

use crate::cache;
use crate::driver::{CuError, Stream};
use crate::error::Error;
use crate::ffi::guard::guard;
use crate::registry;

/// CUDA's opaque stream.
#[repr(C)]
pub struct CUstream_st {
    _opaque: [u8; 0],
}
/// A CUDA stream: `cudaStream_t`, which is `CUstream`.
#[allow(non_camel_case_types)]
pub type cudaStream_t = *mut CUstream_st;

/// What the pool of a context holds, in bytes, and what it did.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct gpupoolStats_t {
    /// In blocks the program holds, rounding included.
    pub live: u64,
    /// The most that was ever live.
    pub peak_live: u64,
    /// Taken from the driver.
    pub held: u64,
    /// The most that was ever held.
    pub peak_held: u64,
    /// Kept whole in bins, ready for the next request of that size.
    pub cached: u64,
    /// Allocations served.
    pub mallocs: u64,
    /// Blocks freed.
    pub frees: u64,
    /// Allocations served out of a bin.
    pub hits: u64,
    /// Events recorded to learn what has finished.
    pub fences: u64,
    /// Times the host waited for the device.
    pub waits: u64,
}

pub(super) fn stream(s: cudaStream_t) -> Stream {
    Stream(s as usize)
}

/// What a door answers for `r`: 0, or the number of the `cudaError_t`.
pub(super) fn code(r: Result<(), Error>) -> c_int {
    match r {
        Ok(()) => 0,
        Err(e) => e.cuda_error(),
    }
}

/// `cudaErrorUnknown`, the answer to an error inside the library.
const UNKNOWN: c_int = 999;

/// Allocates `size` bytes that work submitted to `stream` from now on may use at once; 512-byte aligned or better.
///
/// The memory is of the stream's context; for the NULL, legacy and per-thread streams, of the calling thread's current one.
/// Size 0 succeeds and stores NULL. Returns 0, or a `cudaError_t`: 1 for `ptr` NULL, 2 out of memory, 35 without a driver,
/// 100 without a device, 201 without a context. On an error `*ptr` is NULL.
///
/// # Safety
/// `ptr` is NULL or writable; `stream` is a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupoolMalloc(ptr: *mut *mut c_void, size: usize, stream: cudaStream_t) -> c_int {
    let s = self::stream(stream);
    // The fast path cannot panic, and stands outside the guard.
    if !ptr.is_null()
        && let Some(p) = cache::malloc(size, s)
    {
        // SAFETY: not NULL, and writable by the caller's promise.
        unsafe { ptr.write(p as *mut c_void) };
        return 0;
    }
    malloc_asking(ptr, size, s)
}

#[inline(never)]
fn malloc_asking(ptr: *mut *mut c_void, size: usize, s: Stream) -> c_int {
    if !ptr.is_null()
        && let Some(p) = cache::malloc_asking(size, s)
    {
        // SAFETY: as in `gpupoolMalloc`.
        unsafe { ptr.write(p as *mut c_void) };
        return 0;
    }
    malloc_slow(ptr, size, s)
}

#[cold]
#[inline(never)]
fn malloc_slow(ptr: *mut *mut c_void, size: usize, s: Stream) -> c_int {
    guard(UNKNOWN, || {
        if ptr.is_null() {
            return 1;
        }
        // SAFETY: not NULL, and writable by the promise of the caller of `gpupoolMalloc`.
        let ptr = unsafe { &mut *ptr };
        *ptr = std::ptr::null_mut();
        if size == 0 {
            return 0;
        }
        match cache::malloc_slow(size, s) {
            Ok(p) => {
                *ptr = p as *mut c_void;
                0
            }
            Err(e) => e.cuda_error(),
        }
    })
}

/// Frees a block; `stream` is the last stream that used it. Later work on that stream may reuse the memory at once, another
/// stream gets it only after the work submitted to `stream` so far. Never waits. NULL succeeds.
///
/// Returns 0; 1 for a pointer that is not the start of a live block of the pool (nothing changes then).
///
/// # Safety
/// `stream` is a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupoolFree(ptr: *mut c_void, stream: cudaStream_t) -> c_int {
    let (p, s) = (ptr as u64, self::stream(stream));
    if cache::free(p, s) {
        return 0;
    }
    free_asking(p, s)
}

#[inline(never)]
fn free_asking(p: u64, s: Stream) -> c_int {
    if cache::free_asking(p, s) { 0 } else { free_slow(p, s) }
}

#[cold]
#[inline(never)]
fn free_slow(p: u64, s: Stream) -> c_int {
    guard(UNKNOWN, || if p == 0 { 0 } else { code(cache::free_slow(p, s)) })
}

/// Says that `stream` uses the block too: its free then waits for the work that `stream` has by then as well. Returns 0, or 1
/// for a pointer that is not the start of a live block.
///
/// # Safety
/// `stream` is a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupoolRecordStream(ptr: *mut c_void, stream: cudaStream_t) -> c_int {
    guard(UNKNOWN, || code(registry::record_stream(ptr as u64, self::stream(stream))))
}

/// Gives idle memory of the current context's pool back to the driver until at most `keep` bytes are held; memory whose work is
/// not finished stays. Waits for the device only before CUDA 12.5. Returns 0 or a `cudaError_t`.
#[unsafe(no_mangle)]
pub extern "C" fn gpupoolTrim(keep: usize) -> c_int {
    guard(UNKNOWN, || code(registry::current_pool().and_then(|pool| pool.trim(keep).map(|_| ()))))
}

/// Tells what the current context's pool holds. Returns 0, 1 for `out` NULL, or a `cudaError_t`.
///
/// # Safety
/// `out` is NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupoolGetStats(out: *mut gpupoolStats_t) -> c_int {
    guard(UNKNOWN, || {
        if out.is_null() {
            return 1;
        }
        let answer = registry::current_pool().map(|pool| {
            let s = pool.stats();
            let stats = gpupoolStats_t {
                live: s.live,
                peak_live: s.peak_live,
                held: s.held,
                peak_held: s.peak_held,
                cached: s.cached,
                mallocs: s.mallocs,
                frees: s.frees,
                hits: s.hits,
                fences: s.fences,
                waits: s.waits,
            };
            // SAFETY: not NULL, and writable by the caller's promise.
            unsafe { out.write(stats) }
        });
        code(answer)
    })
}

/// A short English text for what these functions return; never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn gpupoolErrorString(code: c_int) -> *const c_char {
    let text = match code {
        0 => c"no error",
        1 => c"invalid argument, or not the start of a live block",
        2 => c"out of memory",
        _ if code == CuError::NOT_INITIALIZED.0 as c_int => c"CUDA is not initialised",
        _ if code == CuError::DEINITIALIZED.0 as c_int => c"the process is exiting",
        _ if code == CuError::NO_DRIVER.0 as c_int => c"no CUDA driver can be loaded",
        _ if code == CuError::NO_DEVICE.0 as c_int => c"no CUDA device",
        _ if code == CuError::INVALID_CONTEXT.0 as c_int => c"no CUDA context is current",
        _ => c"an error of the CUDA driver; the number is its own",
    };
    text.as_ptr()
}

/// The version of the library: 100 is 0.1.0.
#[unsafe(no_mangle)]
pub extern "C" fn gpupoolVersion() -> c_int {
    100
}
