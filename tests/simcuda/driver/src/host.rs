//! Pinned and registered memory of the host.

use std::ffi::c_void;

use crate::backing::{self, PAGE};
use crate::call::driver_fns;
use crate::capture;
use crate::codes::*;
use crate::context::current;
use crate::engine;
use crate::memory::{Allocation, Freed, Kind};
use crate::state::{State, state};

const DEVICE_MAP: u32 = 2;

driver_fns! {
    fn cuMemAllocHost_v2(ptr: *mut *mut c_void, bytes: usize) {
        allocate(ptr, bytes, DEVICE_MAP)
    }

    fn cuMemHostAlloc(ptr: *mut *mut c_void, bytes: usize, flags: u32) {
        if flags & !7 != 0 {
            return Err(INVALID_VALUE);
        }
        allocate(ptr, bytes, flags | DEVICE_MAP)
    }

    /// Waits for all work on the device, then frees.
    fn cuMemFreeHost(ptr: *mut c_void) {
        let mut st = state();
        st.current()?;
        capture::refuse_unsafe(&st)?;
        match st.allocations.get(&(ptr as u64)) {
            Some(found) if matches!(found.kind, Kind::Pinned { .. }) => {}
            _ => return Err(INVALID_VALUE),
        }
        let allocation = st.allocations.remove(&(ptr as u64)).expect("just found");
        let deps = st.device_pending(allocation.device);
        drop(st);
        engine::wait_all(&deps);
        Freed::new(allocation, false).release();
        Ok(())
    }

    fn cuMemHostGetDevicePointer_v2(device: *mut u64, ptr: *mut c_void, flags: u32) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let st = state();
        st.allocation(ptr as u64).filter(|found| found.is_host()).ok_or(INVALID_VALUE)?;
        write(device, ptr as u64)
    }

    fn cuMemHostGetFlags(flags: *mut u32, ptr: *mut c_void) {
        let st = state();
        match st.allocation(ptr as u64).map(|found| found.kind) {
            Some(Kind::Pinned { flags: set } | Kind::Registered { flags: set }) => write(flags, set),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuMemHostRegister(ptr: *mut c_void, bytes: usize, flags: u32) {
        register(ptr, bytes, flags)
    }

    fn cuMemHostRegister_v2(ptr: *mut c_void, bytes: usize, flags: u32) {
        register(ptr, bytes, flags)
    }

    fn cuMemHostUnregister(ptr: *mut c_void) {
        let mut st = state();
        st.current()?;
        match st.allocations.get(&(ptr as u64)).map(|found| found.kind) {
            Some(Kind::Registered { .. }) => {}
            _ => return Err(HOST_MEMORY_NOT_REGISTERED),
        }
        let allocation = st.allocations.remove(&(ptr as u64)).expect("just found");
        let deps = st.device_pending(allocation.device);
        drop(st);
        engine::wait_all(&deps);
        Ok(())
    }
}

fn allocate(ptr: *mut *mut c_void, bytes: usize, flags: u32) -> Answer {
    write(ptr, std::ptr::null_mut())?;
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let mut st = state();
    let device = st.current()?.device;
    capture::refuse_unsafe(&st)?;
    let pages = bytes.checked_next_multiple_of(PAGE as usize).ok_or(OUT_OF_MEMORY)?;
    let base = backing::host_pages(pages).ok_or(OUT_OF_MEMORY)?;
    insert(&mut st, base, bytes, device, Kind::Pinned { flags })?;
    write(ptr, base as *mut c_void)
}

fn register(ptr: *mut c_void, bytes: usize, flags: u32) -> Answer {
    if ptr.is_null() || bytes == 0 || flags & !15 != 0 {
        return Err(INVALID_VALUE);
    }
    let mut st = state();
    let device = st.current()?.device;
    capture::refuse_unsafe(&st)?;
    let start = ptr as u64;
    let end = start.checked_add(bytes as u64).ok_or(INVALID_VALUE)?;
    let last = st.allocations.range(..end).next_back().map(|(_, found)| found.base + found.size as u64);
    if last.is_some_and(|last| last > start) {
        return Err(HOST_MEMORY_ALREADY_REGISTERED);
    }
    insert(&mut st, start, bytes, device, Kind::Registered { flags: flags | DEVICE_MAP })
}

fn insert(st: &mut State, base: u64, size: usize, device: i32, kind: Kind) -> Answer {
    let context = current()?;
    let buffer_id = st.buffer_id();
    let allocation = Allocation { base, size, device, context, kind, extent: None, buffer_id, sync_memops: false };
    st.allocations.insert(base, allocation);
    Ok(())
}
