//! Legacy IPC: handles for plain device memory that another process opens.
//!
//! A handle names the owner's process, its descriptor of the device's file, and the extent there. The memory is the owner's:
//! once freed there, the other process reads zeros.

use std::sync::Arc;

use crate::backing::{self, DeviceFile, Extent, PAGE};
use crate::call::driver_fns;
use crate::codes::*;
use crate::context::current;
use crate::engine;
use crate::memory::{Freed, Kind};
use crate::state::state;

const MAGIC: [u8; 8] = *b"simcuda\0";
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;

/// What the 64 bytes of a handle hold.
#[repr(C)]
#[derive(Copy, Clone)]
struct Content {
    magic: [u8; 8],
    process: i32,
    fd: i32,
    offset: u64,
    size: u64,
    reserved: [u64; 4],
}

driver_fns! {
    /// An interior pointer gives the handle of its allocation: the offset is lost.
    fn cuIpcGetMemHandle(handle: *mut IpcMemHandle, ptr: u64) {
        let mut st = state();
        st.current()?;
        let found = st.allocation(ptr).filter(|found| found.kind == Kind::Device).ok_or(INVALID_VALUE)?;
        let extent = found.extent.as_ref().ok_or(INVALID_VALUE)?;
        write(handle.cast(), Content {
            magic: MAGIC,
            process: std::process::id() as i32,
            fd: extent.file.fd(),
            offset: extent.offset,
            size: found.size as u64,
            reserved: [0; 4],
        })
    }

    fn cuIpcOpenMemHandle(ptr: *mut u64, handle: IpcMemHandle, flags: u32) {
        open(ptr, &handle, flags)
    }

    fn cuIpcOpenMemHandle_v2(ptr: *mut u64, handle: IpcMemHandle, flags: u32) {
        open(ptr, &handle, flags)
    }

    fn cuIpcCloseMemHandle(ptr: u64) {
        let mut st = state();
        st.current()?;
        let found = st.allocations.get_mut(&ptr).ok_or(INVALID_VALUE)?;
        let Kind::Imported { owner, references } = &mut found.kind else { return Err(INVALID_VALUE) };
        *references -= 1;
        if *references > 0 {
            return Ok(());
        }
        let owner = *owner;
        st.imports.remove(&owner);
        let allocation = st.allocations.remove(&ptr).expect("just found");
        let deps = st.device_pending(allocation.device);
        drop(st);
        engine::wait_all(&deps);
        Freed::new(allocation, false).release();
        Ok(())
    }
}

fn open(ptr: *mut u64, handle: &IpcMemHandle, flags: u32) -> Answer {
    write(ptr, 0)?;
    if flags != LAZY_ENABLE_PEER_ACCESS {
        return Err(INVALID_VALUE);
    }
    // SAFETY: both are 64 bytes of plain data; alignment is not assumed.
    let content: Content = unsafe { (handle as *const IpcMemHandle).cast::<Content>().read_unaligned() };
    if content.magic != MAGIC {
        return Err(INVALID_VALUE);
    }
    let mut st = state();
    let device = st.current()?.device;
    if content.process == std::process::id() as i32 {
        return Err(INVALID_CONTEXT);
    }
    // Offsets are never used twice, so that they tell blocks apart that had one address after another.
    let owner = (content.process, content.offset);
    if let Some(&here) = st.imports.get(&owner) {
        if let Some(Kind::Imported { references, .. }) = st.allocations.get_mut(&here).map(|found| &mut found.kind) {
            *references += 1;
        }
        return write(ptr, here);
    }
    let fd = backing::open(&format!("/proc/{}/fd/{}", content.process, content.fd)).ok_or(INVALID_VALUE)?;
    let (file, _) = DeviceFile::adopt(fd).ok_or(INVALID_VALUE)?;
    let extent = Extent { file: Arc::new(file), offset: content.offset, bytes: content.size.next_multiple_of(PAGE) };
    let base = st.place(extent, content.size as usize, device, current()?, Kind::Imported { owner, references: 1 })?;
    st.imports.insert(owner, base);
    write(ptr, base)
}

const _: () = assert!(size_of::<Content>() == size_of::<IpcMemHandle>());
