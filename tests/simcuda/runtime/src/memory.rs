//! Memory: allocation, copies, attributes, sharing.

use std::ffi::{c_int, c_uint, c_void};

use crate::driver::{context, device};

/// The layout of CUDA's own header.
#[repr(C)]
pub struct PointerAttributes {
    kind: c_int,
    device: c_int,
    device_pointer: *mut c_void,
    host_pointer: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle([u8; 64]);

/// `cudaMemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    kind: c_int,
    id: c_int,
}

type Ptr = *mut c_void;

/// What the allocating calls share: NULL is refused, size 0 succeeds with NULL, a failure leaves NULL.
fn allocate(ptr: *mut Ptr, size: usize, get: impl FnOnce(*mut u64) -> Result<(), u32>) -> Result<(), u32> {
    if ptr.is_null() {
        return Err(1);
    }
    // SAFETY: not NULL, the caller's to write.
    unsafe { ptr.write(std::ptr::null_mut()) };
    if size == 0 {
        return Ok(());
    }
    context()?;
    let mut p = 0u64;
    get(&mut p)?;
    // SAFETY: as above.
    unsafe { ptr.write(p as Ptr) };
    Ok(())
}

api! {
    fn cudaMalloc(ptr: *mut Ptr, size: usize) {
        allocate(ptr, size, |p| cu!("cuMemAlloc", p => *mut u64, size => usize))
    }
    fn cudaFree(ptr: Ptr) {
        context()?;
        if ptr.is_null() {
            return Ok(());
        }
        cu!("cuMemFree", ptr as u64 => u64)
    }
    fn cudaMallocManaged(ptr: *mut Ptr, size: usize, flags: c_uint) {
        allocate(ptr, size, |p| cu!("cuMemAllocManaged", p => *mut u64, size => usize, flags => c_uint))
    }
    fn cudaMallocHost(ptr: *mut Ptr, size: usize) {
        allocate(ptr, size, |p| cu!("cuMemHostAlloc", p => *mut u64, size => usize, 0 => c_uint))
    }
    fn cudaHostAlloc(ptr: *mut Ptr, size: usize, flags: c_uint) {
        allocate(ptr, size, |p| cu!("cuMemHostAlloc", p => *mut u64, size => usize, flags => c_uint))
    }
    fn cudaFreeHost(ptr: Ptr) {
        context()?;
        if ptr.is_null() {
            return Ok(());
        }
        cu!("cuMemFreeHost", ptr => Ptr)
    }
    fn cudaHostGetDevicePointer(to: *mut u64, host: Ptr, flags: c_uint) {
        context()?;
        cu!("cuMemHostGetDevicePointer", to => *mut u64, host => Ptr, flags => c_uint)
    }
    fn cudaMallocAsync(ptr: *mut Ptr, size: usize, stream: Ptr) {
        allocate(ptr, size, |p| cu!("cuMemAllocAsync", p => *mut u64, size => usize, stream => Ptr))
    }
    fn cudaFreeAsync(ptr: Ptr, stream: Ptr) {
        context()?;
        cu!("cuMemFreeAsync", ptr as u64 => u64, stream => Ptr)
    }
    fn cudaMemGetInfo(free: *mut usize, total: *mut usize) {
        context()?;
        cu!("cuMemGetInfo", free => *mut usize, total => *mut usize)
    }
    fn cudaMemcpy(to: Ptr, from: Ptr, size: usize, _kind: c_int) {
        context()?;
        cu!("cuMemcpy", to as u64 => u64, from as u64 => u64, size => usize)
    }
    fn cudaMemcpyAsync(to: Ptr, from: Ptr, size: usize, _kind: c_int, stream: Ptr) {
        context()?;
        cu!("cuMemcpyAsync", to as u64 => u64, from as u64 => u64, size => usize, stream => Ptr)
    }
    fn cudaMemset(ptr: Ptr, value: c_int, size: usize) {
        context()?;
        cu!("cuMemsetD8", ptr as u64 => u64, value as u8 => u8, size => usize)
    }
    fn cudaMemsetAsync(ptr: Ptr, value: c_int, size: usize, stream: Ptr) {
        context()?;
        cu!("cuMemsetD8Async", ptr as u64 => u64, value as u8 => u8, size => usize, stream => Ptr)
    }
    fn cudaMemPrefetchAsync(ptr: Ptr, size: usize, location: Location, flags: c_uint, stream: Ptr) {
        context()?;
        if flags != 0 || !(1..=2).contains(&location.kind) {
            return Err(1);
        }
        // The host is device -1 there.
        let device = if location.kind == 1 { location.id } else { -1 };
        cu!("cuMemPrefetchAsync", ptr as u64 => u64, size => usize, device => c_int, stream => Ptr)
    }
    fn cudaPointerGetAttributes(to: *mut PointerAttributes, ptr: Ptr) {
        if to.is_null() {
            return Err(1);
        }
        context()?;
        let p = ptr as u64;
        let mut a = PointerAttributes { kind: 0, device: -2, device_pointer: std::ptr::null_mut(), host_pointer: std::ptr::null_mut() };
        let (mut kind, mut managed): (c_uint, c_uint) = (0, 0);
        // Numbers of CUpointer_attribute: 2 memory type, 3 device pointer, 4 host pointer, 8 managed, 9 ordinal.
        let known = cu!("cuPointerGetAttribute", &mut kind => *mut c_uint, 2 => c_int, p => u64);
        if known.is_ok() {
            cu!("cuPointerGetAttribute", &mut managed => *mut c_uint, 8 => c_int, p => u64)?;
            cu!("cuPointerGetAttribute", &mut a.device => *mut c_int, 9 => c_int, p => u64)?;
            a.kind = if managed != 0 { 3 } else { kind as c_int };
            a.device_pointer = ptr;
            if a.kind != 2 {
                a.host_pointer = ptr;
            }
        } else {
            a.host_pointer = ptr;
            a.device = device();
        }
        // SAFETY: not NULL, the caller's to write.
        unsafe { to.write(a) };
        Ok(())
    }
    fn cudaIpcGetMemHandle(handle: *mut IpcHandle, ptr: Ptr) {
        context()?;
        cu!("cuIpcGetMemHandle", handle => *mut IpcHandle, ptr as u64 => u64)
    }
    fn cudaIpcOpenMemHandle(ptr: *mut Ptr, handle: IpcHandle, flags: c_uint) {
        context()?;
        cu!("cuIpcOpenMemHandle", ptr => *mut Ptr, handle => IpcHandle, flags => c_uint)
    }
    fn cudaIpcCloseMemHandle(ptr: Ptr) {
        context()?;
        cu!("cuIpcCloseMemHandle", ptr as u64 => u64)
    }
}
