//! What a pointer is: the attributes of pointers.

use std::ffi::{c_int, c_void};

use crate::call::driver_fns;
use crate::codes::*;
use crate::memory::Kind;
use crate::state::{State, state};

const HOST: u32 = 1;
const DEVICE: u32 = 2;

/// Attribute values of one pointer.
struct Found {
    address: u64,
    memory_type: u32,
    context: usize,
    device: i32,
    base: u64,
    size: usize,
    buffer_id: u64,
    managed: bool,
    host_visible: bool,
    ipc_capable: bool,
    sync_memops: bool,
    handle_types: u64,
    pool: usize,
}

fn find(st: &State, address: u64) -> Option<Found> {
    if let Some(a) = st.allocation(address) {
        let managed = matches!(a.kind, Kind::Managed { .. });
        return Some(Found {
            address,
            memory_type: if a.is_host() { HOST } else { DEVICE },
            context: a.context,
            device: a.device,
            base: a.base,
            size: a.size,
            buffer_id: a.buffer_id,
            managed,
            host_visible: managed || a.is_host(),
            ipc_capable: a.kind == Kind::Device,
            sync_memops: a.sync_memops,
            handle_types: 0,
            pool: if let Kind::Pooled(pool) = a.kind { pool } else { 0 },
        });
    }
    let (base, mapping) = st.vmm.mapping(address)?;
    let physical = &st.vmm.handles[&mapping.handle];
    let on_device = physical.location.kind == MemLocation::DEVICE;
    Some(Found {
        address,
        memory_type: if on_device { DEVICE } else { HOST },
        context: 0,
        device: if on_device { physical.location.id } else { 0 },
        base,
        size: mapping.bytes as usize,
        buffer_id: mapping.buffer_id,
        managed: false,
        host_visible: !on_device,
        ipc_capable: false,
        sync_memops: mapping.sync_memops,
        handle_types: physical.handle_types as u64,
        pool: 0,
    })
}

/// Writes one attribute in the type that it has in the API.
fn answer(found: &Found, attribute: c_int, out: *mut c_void) -> Answer {
    match attribute {
        1 => write(out.cast(), found.context),
        2 => write(out.cast(), found.memory_type),
        3 => write(out.cast(), found.address),
        4 if found.host_visible => write(out.cast(), found.address),
        6 => write(out.cast(), found.sync_memops as u32),
        7 => write(out.cast(), found.buffer_id),
        8 => write(out.cast(), found.managed as u32),
        9 => write(out.cast(), found.device),
        10 => write(out.cast(), found.ipc_capable as u32),
        11 | 19 => write(out.cast(), found.base),
        12 | 18 => write(out.cast(), found.size),
        13 => write(out.cast(), 1u32),
        14 => write(out.cast(), found.handle_types),
        15 => write(out.cast(), (found.memory_type == DEVICE && !found.managed) as u32),
        16 => write(out.cast(), 3u32),
        17 => write(out.cast(), found.pool),
        20 => write(out.cast(), found.buffer_id),
        _ => Err(INVALID_VALUE),
    }
}

/// Writes what an attribute is for a pointer that the driver does not know.
fn answer_unknown(attribute: c_int, out: *mut c_void) -> Answer {
    match attribute {
        1 | 3 | 4 | 7 | 11 | 12 | 14 | 17..=20 => write(out.cast(), 0u64),
        9 => write(out.cast(), -2i32),
        2 | 6 | 8 | 10 | 13 | 15 | 16 => write(out.cast(), 0u32),
        _ => Err(INVALID_VALUE),
    }
}

driver_fns! {
    fn cuPointerGetAttribute(out: *mut c_void, attribute: c_int, ptr: u64) {
        let mut st = state();
        st.current()?;
        answer(&find(&st, ptr).ok_or(INVALID_VALUE)?, attribute, out)
    }

    /// Succeeds for unknown pointers too, with empty values.
    fn cuPointerGetAttributes(count: u32, attributes: *const c_int, out: *const *mut c_void, ptr: u64) {
        if attributes.is_null() || out.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut st = state();
        st.current()?;
        let found = find(&st, ptr);
        for i in 0..count as usize {
            // SAFETY: the caller vouches for `count` elements in both arrays.
            let (attribute, out) = unsafe { (*attributes.add(i), *out.add(i)) };
            match &found {
                Some(found) if answer(found, attribute, out).is_ok() => {}
                _ => answer_unknown(attribute, out)?,
            }
        }
        Ok(())
    }

    fn cuPointerSetAttribute(value: *const c_void, attribute: c_int, ptr: u64) {
        const SYNC_MEMOPS: c_int = 6;
        let mut st = state();
        st.current()?;
        if attribute != SYNC_MEMOPS {
            return Err(INVALID_VALUE);
        }
        let set = read(value.cast::<u32>())? != 0;
        let base = st.allocation(ptr).map(|found| found.base);
        match base {
            Some(base) => st.allocations.get_mut(&base).expect("just found").sync_memops = set,
            None => st.vmm.mapping_mut(ptr).ok_or(INVALID_VALUE)?.sync_memops = set,
        }
        Ok(())
    }
}
