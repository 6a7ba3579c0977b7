//! Stream-ordered memory. A pool keeps nothing: memory freed goes back when the stream reaches the free, so that its settings
//! are recorded and without effect.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::call::driver_fns;
use crate::capture;
use crate::codes::*;
use crate::device::check;
use crate::engine::{self, Op};
use crate::memory::{Freed, Kind};
use crate::state::state;
use crate::stream::Null;

pub struct Pool {
    device: i32,
    /// Attributes 1 to 3 (ints) and 4 (64 bits), by number.
    settings: [u64; 5],
    pub used: u64,
    used_high: u64,
}

impl Pool {
    pub fn new(device: i32) -> Pool {
        Pool { device, settings: [0, 1, 1, 1, 0], used: 0, used_high: 0 }
    }
}

driver_fns! {
    fn cuMemAllocAsync | cuMemAllocAsync_ptsz(ptr: *mut u64, bytes: usize, stream: usize), null => {
        allocate(ptr, bytes, None, stream, null)
    }

    fn cuMemAllocFromPoolAsync | cuMemAllocFromPoolAsync_ptsz(ptr: *mut u64, bytes: usize, pool: usize, stream: usize), null => {
        allocate(ptr, bytes, Some(pool), stream, null)
    }

    fn cuMemFreeAsync | cuMemFreeAsync_ptsz(ptr: u64, stream: usize), null => {
        if ptr == 0 {
            return Err(INVALID_VALUE);
        }
        let mut st = state();
        let stream = st.stream(stream, null)?;
        let allocation = st.detach(ptr)?;
        let device = allocation.device;
        let captured = stream.capture.lock().is_some();
        let freed = Arc::new(Freed::new(allocation, !captured));
        if let Some(freed) = capture::take_free(&st, &stream, freed)? {
            st.device(device).frees_pending += 1;
            st.submit(&stream, Op::Free(freed))?;
        }
        Ok(())
    }

    fn cuDeviceGetDefaultMemPool(pool: *mut usize, device: c_int) {
        check(device)?;
        let handle = state().device(device).default_pool;
        write(pool, handle)
    }

    fn cuDeviceGetMemPool(pool: *mut usize, device: c_int) {
        check(device)?;
        let handle = state().device(device).current_pool;
        write(pool, handle)
    }

    fn cuDeviceSetMemPool(device: c_int, pool: usize) {
        check(device)?;
        let mut st = state();
        if st.pools.get(pool).ok_or(INVALID_VALUE)?.device != device {
            return Err(INVALID_VALUE);
        }
        st.device(device).current_pool = pool;
        Ok(())
    }

    fn cuMemPoolCreate(pool: *mut usize, props: *const PoolProps) {
        let props = read(props)?;
        if props.kind != 1 || props.location.kind != MemLocation::DEVICE {
            return Err(INVALID_VALUE);
        }
        check(props.location.id)?;
        let handle = state().pools.insert(Pool::new(props.location.id));
        write(pool, handle)
    }

    fn cuMemPoolDestroy(pool: usize) {
        let mut st = state();
        let device = st.pools.get(pool).ok_or(INVALID_VALUE)?.device;
        let default = st.device(device).default_pool;
        if default == pool {
            return Err(INVALID_VALUE);
        }
        if st.device(device).current_pool == pool {
            st.device(device).current_pool = default;
        }
        st.pools.remove(pool);
        Ok(())
    }

    fn cuMemPoolTrimTo(pool: usize, _keep: usize) {
        state().pools.get(pool).map(|_| ()).ok_or(INVALID_VALUE)
    }

    fn cuMemPoolSetAttribute(pool: usize, attribute: c_int, value: *mut c_void) {
        let mut st = state();
        let pool = st.pools.get_mut(pool).ok_or(INVALID_VALUE)?;
        match attribute {
            1..=3 => pool.settings[attribute as usize] = read(value.cast::<c_int>())? as u64,
            4 => pool.settings[4] = read(value.cast::<u64>())?,
            6 | 8 if read(value.cast::<u64>())? == 0 => pool.used_high = pool.used,
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }

    fn cuMemPoolGetAttribute(pool: usize, attribute: c_int, value: *mut c_void) {
        let st = state();
        let pool = st.pools.get(pool).ok_or(INVALID_VALUE)?;
        match attribute {
            1..=3 => write(value.cast::<c_int>(), pool.settings[attribute as usize] as c_int),
            4 => write(value.cast::<u64>(), pool.settings[4]),
            5 | 7 => write(value.cast::<u64>(), pool.used),
            6 | 8 => write(value.cast::<u64>(), pool.used_high),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuMemPoolSetAccess(pool: usize, map: *const AccessDesc, count: usize) {
        if map.is_null() || count == 0 {
            return Err(INVALID_VALUE);
        }
        state().pools.get(pool).map(|_| ()).ok_or(INVALID_VALUE)
    }

    fn cuMemPoolGetAccess(flags: *mut c_int, pool: usize, location: *const MemLocation) {
        read(location)?;
        state().pools.get(pool).ok_or(INVALID_VALUE)?;
        write(flags, 3)
    }
}

fn allocate(ptr: *mut u64, bytes: usize, pool: Option<usize>, stream: usize, null: Null) -> Answer {
    write(ptr, 0)?;
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let mut st = state();
    let target = st.stream(stream, null)?;
    let handle = match pool {
        Some(handle) => handle,
        None => {
            let device = st.context(target.context)?.device;
            st.device(device).current_pool
        }
    };
    let device = st.pools.get(handle).ok_or(INVALID_VALUE)?.device;
    let mut got = st.allocate(bytes, device, Kind::Pooled(handle));
    if got == Err(OUT_OF_MEMORY) && st.device(device).frees_pending > 0 {
        // The real pool waits for frees that are on their way, too.
        let deps = st.device_pending(device);
        drop(st);
        engine::wait_all(&deps);
        st = state();
        got = st.allocate(bytes, device, Kind::Pooled(handle));
    }
    let base = got?;
    let pool = st.pools.get_mut(handle).ok_or(INVALID_VALUE)?;
    pool.used += (bytes as u64).next_multiple_of(crate::backing::PAGE);
    pool.used_high = pool.used_high.max(pool.used);
    write(ptr, base)
}
