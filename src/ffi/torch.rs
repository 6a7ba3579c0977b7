//! Allocator slots of frameworks: cutorch's `THCDeviceAllocator` and PyTorch's pluggable allocator.

// The names are the interface's own.
#![allow(non_snake_case)]

use std::ffi::{c_int, c_void};

use crate::driver::{Stream, driver};
use crate::error::Error;
use crate::ffi::gpupool::{cudaStream_t, gpupoolFree, gpupoolMalloc, stream};
use crate::ffi::guard::guard;
use crate::registry;

/// CUDA's error numbers, in the types of the header.
#[allow(non_camel_case_types)]
type cudaError_t = c_int;

/// cutorch's allocator slot: functions, and a `state` that each gets as its first argument.
#[repr(C)]
pub struct THCDeviceAllocator {
    /// Allocates `size` bytes for a stream.
    pub malloc: Option<
        unsafe extern "C" fn(
            state: *mut c_void,
            ptr: *mut *mut c_void,
            size: usize,
            stream: cudaStream_t,
        ) -> cudaError_t,
    >,
    /// Moves a block to a new one of `new_size` bytes; what fits is copied on the stream, and the old block goes as `free` has
    /// it. On an error the pointer stays as it was.
    pub realloc: Option<
        unsafe extern "C" fn(
            state: *mut c_void,
            ptr: *mut *mut c_void,
            old_size: usize,
            new_size: usize,
            stream: cudaStream_t,
        ) -> cudaError_t,
    >,
    /// Frees a block, whatever streams used it.
    pub free: Option<unsafe extern "C" fn(state: *mut c_void, ptr: *mut c_void) -> cudaError_t>,
    /// Gives idle memory of all devices back to the driver.
    pub emptyCache: Option<unsafe extern "C" fn(state: *mut c_void) -> cudaError_t>,
    /// Adds a device's idle bytes to `*idle`, and raises `*largest` to its largest idle block.
    pub cacheInfo: Option<
        unsafe extern "C" fn(state: *mut c_void, device: c_int, idle: *mut usize, largest: *mut usize) -> cudaError_t,
    >,
    /// The first argument of the functions; they do not look at it.
    pub state: *mut c_void,
}

// SAFETY: the table is never written; its functions may be called from any thread.
unsafe impl Sync for THCDeviceAllocator {}

static THC: THCDeviceAllocator = THCDeviceAllocator {
    malloc: Some(thc_malloc),
    realloc: Some(thc_realloc),
    free: Some(thc_free),
    emptyCache: Some(thc_empty_cache),
    cacheInfo: Some(thc_cache_info),
    state: std::ptr::null_mut(),
};

/// The pool as cutorch's allocator. The table is static and must not be changed or freed.
///
/// `free` carries no stream there, as cutorch's does not: the block is freed on the legacy stream, and another stream gets it
/// only after all work submitted to the context so far. `realloc` copies what fits on the given stream.
#[unsafe(no_mangle)]
pub extern "C" fn gpupoolTHCDeviceAllocator() -> *const THCDeviceAllocator {
    &THC
}

unsafe extern "C" fn thc_malloc(_: *mut c_void, ptr: *mut *mut c_void, size: usize, s: cudaStream_t) -> c_int {
    // SAFETY: the same promises.
    unsafe { gpupoolMalloc(ptr, size, s) }
}

unsafe extern "C" fn thc_realloc(
    _: *mut c_void,
    ptr: *mut *mut c_void,
    old_size: usize,
    new_size: usize,
    s: cudaStream_t,
) -> c_int {
    if ptr.is_null() {
        return 1;
    }
    // SAFETY: not NULL; the caller's pointer to its block.
    let old = unsafe { *ptr };
    let mut new = std::ptr::null_mut();
    // SAFETY: `new` is live; the stream is the caller's.
    let code = unsafe { gpupoolMalloc(&mut new, new_size, s) };
    if code != 0 {
        return code;
    }
    let kept = old_size.min(new_size);
    if !old.is_null() && kept > 0 {
        let copied = guard(999, || {
            let copied = driver().and_then(|d| d.memcpy_async(new as u64, old as u64, kept, stream(s)));
            crate::ffi::gpupool::code(copied.map_err(Error::from))
        });
        if copied != 0 {
            // SAFETY: the new block is ours and unused.
            unsafe { gpupoolFree(new, s) };
            return copied;
        }
    }
    // Other streams may still use the old block: it goes as `free` goes, not in the order of `s` alone.
    // SAFETY: the table's function ignores its state.
    let freed = unsafe { thc_free(std::ptr::null_mut(), old) };
    if freed != 0 {
        // SAFETY: the new block is ours; the copy on `s` was its only use.
        unsafe { gpupoolFree(new, s) };
        return freed;
    }
    // SAFETY: not NULL, and the caller's to write.
    unsafe { *ptr = new };
    0
}

unsafe extern "C" fn thc_free(_: *mut c_void, ptr: *mut c_void) -> c_int {
    guard(999, || {
        if ptr.is_null() {
            return 0;
        }
        crate::ffi::gpupool::code(registry::free_everyone(ptr as u64))
    })
}

unsafe extern "C" fn thc_empty_cache(_: *mut c_void) -> c_int {
    guard(999, || {
        let trimmed = registry::pools().iter().try_for_each(|pool| pool.trim(0).map(|_| ()));
        crate::ffi::gpupool::code(trimmed)
    })
}

unsafe extern "C" fn thc_cache_info(_: *mut c_void, device: c_int, idle: *mut usize, largest: *mut usize) -> c_int {
    guard(999, || {
        if idle.is_null() || largest.is_null() {
            return 1;
        }
        let answer = registry::pool_of_device(device).map(|pool| pool.idle());
        // SAFETY: neither is NULL; the caller's to write. cutorch adds to both over its own caches, as its interface has it.
        crate::ffi::gpupool::code(answer.map(|(bytes, block)| unsafe {
            *idle += bytes;
            *largest = (*largest).max(block);
        }))
    })
}

/// PyTorch's pluggable allocator: allocates on `device`, for `stream`. NULL for size 0, and when memory cannot be had (PyTorch
/// does not look: set `GPUPOOL_LOG=warn` to see why).
///
/// # Safety
/// `stream` is a live stream of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_torch_malloc(size: isize, device: c_int, stream: cudaStream_t) -> *mut c_void {
    guard(std::ptr::null_mut(), || {
        let Ok(size) = usize::try_from(size) else {
            return std::ptr::null_mut();
        };
        if size == 0 {
            return std::ptr::null_mut();
        }
        let s: Stream = self::stream(stream);
        let answer = registry::pool_of_device(device).and_then(|pool| pool.malloc(size, s));
        answer.map_or_else(
            |e| {
                log::warn!("no memory for PyTorch: {e}");
                std::ptr::null_mut()
            },
            |p| p as *mut c_void,
        )
    })
}

/// PyTorch's pluggable allocator: frees what `gpupool_torch_malloc` gave. `stream` is the stream it was allocated for.
///
/// # Safety
/// `stream` is a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpupool_torch_free(ptr: *mut c_void, _size: isize, _device: c_int, stream: cudaStream_t) {
    // SAFETY: the same promises.
    let code = unsafe { gpupoolFree(ptr, stream) };
    if code != 0 {
        log::warn!("PyTorch freed {ptr:p}, which is not a live block: {code}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn realloc_frees_for_every_stream_and_keeps_the_pointer_on_an_error() {
        const SIZE: usize = 4 << 20;
        let sim = testing::sim();
        sim.context(0);
        let (a, b) = (sim.stream(), sim.stream());
        let raw = a.0 as cudaStream_t;
        let none = std::ptr::null_mut();
        let (mut p, mut q, mut stranger) = (none, none, 0x1000 as *mut c_void);
        // SAFETY: live pointers and streams; the stranger is not looked into, as no byte of it is kept.
        unsafe {
            assert_eq!(thc_malloc(none, &mut p, SIZE, raw), 0);
            let old = p;
            let gate = sim.gate(b);
            sim.memset(old as u64, 1, 64, b);
            assert_eq!(thc_realloc(none, &mut p, SIZE, SIZE + SIZE / 2, raw), 0);
            assert_eq!(thc_malloc(none, &mut q, SIZE, raw), 0);
            assert_ne!(q, old, "another stream still writes there");
            gate.open();
            assert_eq!(thc_realloc(none, &mut stranger, 0, 512, raw), 1);
            assert_eq!(stranger as usize, 0x1000);
            assert_eq!((thc_free(none, p), thc_free(none, q)), (0, 0));
        }
        sim.driver.ctx_synchronize().unwrap();
    }
}
