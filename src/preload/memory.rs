//! Allocation, questions about pointers, sharing between processes, peers, pinned memory.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use super::hooks::hooks;
use crate::driver::{self, Context, DevicePtr, Stream};
use crate::error::Error;
use crate::pinned;
use crate::pool::Pool;
use crate::registry;
use crate::stats::{self, Door, count};

type Raw = *mut c_void;

/// A block for a call that names no stream. None: the real function answers, because the program is not far enough, because a capture
/// forbids it or not, or because there is no memory and its error is the right one. `Some(Err(2))` when the limit forbids more.
pub(super) fn allocate(size: usize, door: &Door) -> Option<Result<DevicePtr, u32>> {
    let served = || {
        if size == 0 || crate::pool::fence::capturing() {
            // Whether a capture allows it depends on its mode and thread: the driver knows.
            return None;
        }
        match registry::with_present_pool(|pool| pool.malloc_everyone(size))? {
            Ok(p) => Some(Ok(p)),
            Err(Error::OutOfMemory { .. }) if crate::config::get().max_mem.is_some() => Some(Err(2)),
            Err(Error::OutOfMemory { .. }) if crate::config::get().max_mem_percent.is_some() => Some(Err(2)),
            Err(e) => {
                log::debug!("the driver is asked for {size} bytes: {e}");
                None
            }
        }
    };
    let answer = served();
    count(if matches!(answer, Some(Ok(_))) { &door.mallocs } else { &door.foreign_mallocs });
    answer
}

/// Frees a block of a pool. None: it is none.
pub(super) fn free(p: DevicePtr, door: &Door, how: impl FnOnce(&Pool) -> Result<(), Error>) -> Option<u32> {
    if p == 0 {
        return None;
    }
    let Some(pool) = registry::owner_of(p).filter(|_| !driver::is_forked()) else {
        count(&door.foreign_frees);
        return None;
    };
    if driver::is_exiting() {
        // A static destructor's free: the driver takes everything anyway.
        return Some(0);
    }
    match how(&pool) {
        Ok(()) => {
            count(&door.frees);
            Some(0)
        }
        Err(Error::UnknownPointer) => {
            count(&door.foreign_frees);
            None
        }
        Err(e) => Some(e.cuda_error() as u32),
    }
}

/// What the pool's answer differs in; true when the attribute was one of those.
fn pool_attribute(attribute: c_int, p: DevicePtr, out: Raw) -> bool {
    const CONTEXT: c_int = 1;
    const BUFFER_ID: c_int = 7;
    const RANGE_START: c_int = 11;
    const RANGE_SIZE: c_int = 12;
    const HANDLE_TYPES: c_int = 14;
    const MAPPING_SIZE: c_int = 18;
    const MAPPING_BASE: c_int = 19;
    let ours = [CONTEXT, BUFFER_ID, RANGE_START, RANGE_SIZE, HANDLE_TYPES, MAPPING_SIZE, MAPPING_BASE];
    if out.is_null() || !ours.contains(&attribute) {
        return false;
    }
    let Some((pool, base, size)) = registry::block_of(p) else { return false };
    let value = match attribute {
        CONTEXT => pool.ctx().0 as u64,
        BUFFER_ID => pool.serial_of(base),
        RANGE_START | MAPPING_BASE => base,
        RANGE_SIZE | MAPPING_SIZE => size as u64,
        // As of cudaMalloc's memory, which cannot be exported: the pages' neighbours are others' blocks.
        _ => 0,
    };
    // SAFETY: the driver's contract: `out` points to a value of the attribute's type, 8 bytes for each of these.
    unsafe { (out as *mut u64).write_unaligned(value) };
    true
}

/// Free and total bytes as a program may plan with them: what the pool holds idle is free, and a limit is the total.
fn plan(free: *mut usize, total: *mut usize) {
    let Some(d) = driver::present() else { return };
    let Ok(ordinal) = d.ctx_device() else { return };
    let idle: usize = registry::pools().iter().filter(|p| p.ordinal() == ordinal).map(|p| p.idle_bytes()).sum();
    let limit = crate::source::budget::of(d, ordinal).ok().and_then(|b| Some((b.limit()?, b.left()?)));
    // SAFETY: the real function just wrote there, or they are NULL.
    unsafe {
        if !free.is_null() {
            *free += idle;
            if let Some((limit, left)) = limit {
                *free = (*free).min(left + idle).min(limit);
            }
        }
        if let (false, Some((limit, _))) = (total.is_null(), limit) {
            *total = (*total).min(limit);
        }
    }
}

/// A free of what is no live block. Idle memory of a pool is nobody's, and where pools cut up the driver's blocks the driver must not
/// be asked: it would free all of one.
fn unknown(p: DevicePtr, real: impl FnOnce() -> u32) -> u32 {
    if p != 0 && registry::is_idle(p) { 1 } else { real() }
}

/// While a stream is captured a free is forbidden or not, by mode and thread: the driver is asked, with an address that is nobody's. The
/// code when it forbids it.
pub(super) fn forbidden(p: DevicePtr, real: impl Fn(DevicePtr) -> u32) -> Option<u32> {
    if !crate::pool::fence::capturing() || registry::owner_of(p).is_none() || driver::is_exiting() {
        return None;
    }
    // Inside a block, so never the start of one of the driver's: it frees nothing and answers 1 where frees are allowed.
    Some(real(p + 1)).filter(|&code| code >= 900)
}

/// Asks the driver for memory of its own; out of memory, once more after the pools have given back what they can.
fn foreign(ask: impl Fn() -> u32) -> u32 {
    let code = ask();
    if code == 2 && registry::give_way() { ask() } else { code }
}

/// A handle of ours for the block that starts at `base`; None when the driver's own is right.
fn share(pool: &Pool, base: DevicePtr) -> Result<Option<[u8; 64]>, Error> {
    let d = driver::driver()?;
    let Some(block) = pool.share(base)? else { return Ok(None) };
    Ok(Some(crate::ipc::publish(d, block, pool.serial_of(base))?))
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle([u8; 64]);

hooks! {
    table TABLE;

    fn [cuMemAlloc_v2] (out: *mut DevicePtr, size: usize) = |real, _name| {
        match if out.is_null() { None } else { allocate(size, &stats::DRIVER) } {
            // SAFETY: not NULL; the caller's to be written.
            Some(Ok(p)) => unsafe { out.write(p); 0 },
            Some(Err(code)) => code,
            // As the other allocators: a capture may have sent it here.
            None => foreign(|| real(out, size)),
        }
    };
    fn [cuMemFree_v2] (p: DevicePtr) = |real, _name| {
        match forbidden(p, real) {
            Some(code) => code,
            None => free(p, &stats::DRIVER, |pool| registry::free_everyone_in(pool, p)).unwrap_or_else(|| unknown(p, || real(p))),
        }
    };
    fn [cuMemFreeAsync, cuMemFreeAsync_ptsz] (p: DevicePtr, s: usize) = |real, name| {
        let stream = if s == 0 && name.ends_with("_ptsz") { Stream::PER_THREAD } else { Stream(s) };
        free(p, &stats::DRIVER, |_| registry::free(p, stream)).unwrap_or_else(|| unknown(p, || real(p, s)))
    };

    fn [cuMemGetInfo_v2] (free: *mut usize, total: *mut usize) = |real, _name| {
        let code = real(free, total);
        if code == 0 {
            plan(free, total);
        }
        code
    };
    fn [cuMemGetAddressRange_v2] (base: *mut DevicePtr, size: *mut usize, p: DevicePtr) = |real, _name| {
        let opened = crate::ipc::range_of(p);
        match opened.or_else(|| registry::block_of(p).map(|(_, start, bytes)| (start, bytes))) {
            // SAFETY: NULL, or the caller's to be written.
            Some((start, bytes)) => unsafe {
                if !base.is_null() { base.write(start) }
                if !size.is_null() { size.write(bytes) }
                0
            },
            // The driver would tell of the page.
            None => if registry::is_idle(p) { 1 } else { real(base, size, p) },
        }
    };
    fn [cuPointerGetAttribute] (out: Raw, attribute: c_int, p: DevicePtr) = |real, _name| {
        if pool_attribute(attribute, p, out) {
            0
        } else if registry::is_idle(p) {
            1
        } else {
            real(out, attribute, p)
        }
    };
    fn [cuPointerGetAttributes] (n: c_uint, attributes: *const c_int, out: *mut Raw, p: DevicePtr) = |real, _name| {
        let code = real(n, attributes, out, p);
        if code == 0 && !attributes.is_null() && !out.is_null() {
            for i in 0..n as usize {
                // SAFETY: the driver's contract: both arrays have n elements.
                let (attribute, out) = unsafe { (*attributes.add(i), *out.add(i)) };
                pool_attribute(attribute, p, out);
            }
        }
        code
    };
    fn [cuPointerSetAttribute] (value: Raw, attribute: c_int, p: DevicePtr) = |real, _name| {
        const SYNC_MEMOPS: c_int = 6;
        if attribute == SYNC_MEMOPS && let Some((pool, ..)) = registry::block_of(p) {
            pool.finished_only("its memory is registered for GPUDirect");
        }
        real(value, attribute, p)
    };
    fn [cuMemRetainAllocationHandle] (out: *mut c_ulonglong, p: Raw) = |real, _name| {
        // As for cudaMalloc's memory: the pages are shared with other blocks.
        if registry::block_of(p as DevicePtr).is_some() { 1 } else { real(out, p) }
    };
    fn [cuMemGetHandleForAddressRange] (out: Raw, p: DevicePtr, size: usize, kind: c_int, flags: c_ulonglong) = |real, _name| {
        if let Some((pool, ..)) = registry::block_of(p) {
            pool.finished_only("its memory is exported");
        }
        real(out, p, size, kind, flags)
    };

    // ---- memory that is not the pool's: what the pool holds idle must not be what it lacks ----

    fn [cuMemAllocAsync, cuMemAllocAsync_ptsz] (out: Raw, size: usize, s: usize) = |real, _name| {
        foreign(|| real(out, size, s))
    };
    fn [cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz] (out: Raw, size: usize, from: Raw, s: usize) = |real, _name| {
        foreign(|| real(out, size, from, s))
    };
    fn [cuMemAllocPitch_v2] (out: Raw, pitch: Raw, width: usize, height: usize, element: c_uint) = |real, _name| {
        foreign(|| real(out, pitch, width, height, element))
    };
    fn [cuMemAllocManaged] (out: Raw, size: usize, flags: c_uint) = |real, _name| foreign(|| real(out, size, flags));
    fn [cuMemCreate] (out: Raw, size: usize, what: Raw, flags: c_ulonglong) = |real, _name| {
        foreign(|| real(out, size, what, flags))
    };
    fn [cuArrayCreate_v2, cuArray3DCreate_v2] (out: Raw, what: Raw) = |real, _name| foreign(|| real(out, what));
    fn [cuMipmappedArrayCreate] (out: Raw, what: Raw, levels: c_uint) = |real, _name| foreign(|| real(out, what, levels));
    fn [cuModuleLoad, cuModuleLoadData, cuModuleLoadFatBinary] (out: Raw, image: Raw) = |real, _name| {
        foreign(|| real(out, image))
    };
    fn [cuModuleLoadDataEx] (out: Raw, image: Raw, n: c_uint, options: Raw, values: Raw) = |real, _name| {
        foreign(|| real(out, image, n, options, values))
    };
    fn [cuLibraryLoadData] (
        out: Raw, code: Raw, jit: Raw, jit_values: Raw, jits: c_uint, options: Raw, values: Raw, n: c_uint
    ) = |real, _name| foreign(|| real(out, code, jit, jit_values, jits, options, values, n));

    // ---- sharing between processes ----

    fn [cuIpcGetMemHandle] (out: *mut IpcHandle, p: DevicePtr) = |real, _name| {
        match registry::block_of(p) {
            // An interior pointer's handle shows the block, as the real one does.
            Some((pool, base, _)) if !out.is_null() => match share(&pool, base) {
                // SAFETY: not NULL; the caller's to be written.
                Ok(Some(handle)) => unsafe { out.write(IpcHandle(handle)); 0 },
                // A whole block of the driver's: its own handle is right.
                Ok(None) => real(out, p),
                Err(e) => e.cuda_error() as u32,
            },
            _ => real(out, p),
        }
    };
    fn [cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2] (out: *mut DevicePtr, handle: IpcHandle, flags: c_uint) = |real, _name| {
        if out.is_null() || !crate::ipc::is_ours(&handle.0) {
            return real(out, handle, flags);
        }
        match driver::present().ok_or(crate::driver::CuError::NOT_INITIALIZED).and_then(|d| crate::ipc::open(d, &handle.0)) {
            // SAFETY: not NULL; the caller's to be written.
            Ok(p) => unsafe { out.write(p); 0 },
            Err(e) => e.0,
        }
    };
    fn [cuIpcCloseMemHandle] (p: DevicePtr) = |real, _name| {
        match driver::present().and_then(|d| crate::ipc::close(d, p)) {
            Some(Ok(())) => 0,
            Some(Err(e)) => e.0,
            None => real(p),
        }
    };

    // ---- peers ----

    fn [cuCtxEnablePeerAccess] (owner: usize, flags: c_uint) = |real, _name| {
        let code = real(owner, flags);
        if code == 0 && let Some(reader) = driver::present().and_then(|d| d.ctx_current().ok()?) {
            registry::open_to(Context(owner), reader);
        }
        code
    };

    // ---- pinned memory ----

    fn [cuMemHostAlloc] (out: *mut Raw, size: usize, flags: c_uint) = |real, _name| {
        pinned::allocate(out, size, flags, |size| real(out, size, flags))
    };
    fn [cuMemAllocHost_v2] (out: *mut Raw, size: usize) = |real, _name| {
        pinned::allocate(out, size, 0, |size| real(out, size))
    };
    fn [cuMemFreeHost] (p: Raw) = |real, _name| {
        if pinned::keep(p as usize) { 0 } else { real(p) }
    };
}
