//! Devices, versions, peers.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::driver::{VERSION, bind, context, device, forget, lookup};

/// The layout of this project's own header.
#[repr(C)]
pub struct DeviceProp {
    name: [c_char; 256],
    total: usize,
    major: c_int,
    minor: c_int,
    processors: c_int,
    integrated: c_int,
    can_map_host: c_int,
    unified: c_int,
    managed: c_int,
    concurrent_managed: c_int,
    pci_bus: c_int,
    pci_device: c_int,
    pci_domain: c_int,
}

/// A pointer that the caller must give.
fn given<T>(p: *mut T) -> Result<*mut T, u32> {
    if p.is_null() { Err(1) } else { Ok(p) }
}

fn attribute(number: c_int, device: c_int) -> Result<c_int, u32> {
    let mut value = 0;
    cu!("cuDeviceGetAttribute", &mut value => *mut c_int, number => c_int, device => c_int)?;
    Ok(value)
}

api! {
    fn cudaDriverGetVersion(version: *mut c_int) {
        cu!("cuDriverGetVersion", given(version)? => *mut c_int)
    }
    fn cudaRuntimeGetVersion(version: *mut c_int) {
        // SAFETY: not NULL, the caller's to write.
        unsafe { given(version)?.write(VERSION) };
        Ok(())
    }
    fn cudaGetDeviceCount(count: *mut c_int) {
        cu!("cuDeviceGetCount", given(count)? => *mut c_int)
    }
    fn cudaSetDevice(ordinal: c_int) {
        bind(ordinal)
    }
    fn cudaGetDevice(ordinal: *mut c_int) {
        // SAFETY: not NULL, the caller's to write.
        unsafe { given(ordinal)?.write(device()) };
        Ok(())
    }
    fn cudaGetDeviceProperties(prop: *mut DeviceProp, ordinal: c_int) {
        let mut p = DeviceProp {
            name: [0; 256], total: 0, major: attribute(75, ordinal)?, minor: attribute(76, ordinal)?,
            processors: attribute(16, ordinal)?, integrated: attribute(18, ordinal)?, can_map_host: attribute(19, ordinal)?,
            unified: attribute(41, ordinal)?, managed: attribute(83, ordinal)?, concurrent_managed: attribute(89, ordinal)?,
            pci_bus: attribute(33, ordinal)?, pci_device: attribute(34, ordinal)?, pci_domain: attribute(50, ordinal)?,
        };
        cu!("cuDeviceGetName", p.name.as_mut_ptr() => *mut c_char, 256 => c_int, ordinal => c_int)?;
        cu!("cuDeviceTotalMem", &mut p.total => *mut usize, ordinal => c_int)?;
        // SAFETY: not NULL, the caller's to write.
        unsafe { given(prop)?.write(p) };
        Ok(())
    }
    fn cudaDeviceGetAttribute(value: *mut c_int, number: c_int, ordinal: c_int) {
        cu!("cuDeviceGetAttribute", given(value)? => *mut c_int, number => c_int, ordinal => c_int)
    }
    fn cudaDeviceSynchronize() {
        context()?;
        cu!("cuCtxSynchronize")
    }
    fn cudaDeviceReset() {
        let ordinal = device();
        cu!("cuDevicePrimaryCtxReset", ordinal => c_int)?;
        forget(ordinal);
        Ok(())
    }
    fn cudaDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        context()?;
        cu!("cuCtxGetStreamPriorityRange", least => *mut c_int, greatest => *mut c_int)
    }
    fn cudaDeviceCanAccessPeer(can: *mut c_int, ordinal: c_int, peer: c_int) {
        cu!("cuDeviceCanAccessPeer", given(can)? => *mut c_int, ordinal => c_int, peer => c_int)
    }
    fn cudaDeviceEnablePeerAccess(peer: c_int, flags: c_uint) {
        context()?;
        let mine = device();
        bind(peer)?;
        let mut theirs: usize = 0;
        let got = cu!("cuCtxGetCurrent", &mut theirs => *mut usize);
        bind(mine)?;
        got?;
        cu!("cuCtxEnablePeerAccess", theirs => usize, flags => c_uint)
    }
    fn cudaDeviceDisablePeerAccess(peer: c_int) {
        context()?;
        let mine = device();
        bind(peer)?;
        let mut theirs: usize = 0;
        let got = cu!("cuCtxGetCurrent", &mut theirs => *mut usize);
        bind(mine)?;
        got?;
        cu!("cuCtxDisablePeerAccess", theirs => usize)
    }
    fn cudaGetDriverEntryPointByVersion(symbol: *const c_char, f: *mut *mut c_void, version: c_uint, flags: u64, status: *mut c_int) {
        given(f)?;
        // SAFETY: a NUL-terminated name by the caller's promise.
        let name = unsafe { CStr::from_ptr(symbol) }.to_str().map_err(|_| 1u32)?;
        let found = lookup(name, version as c_int, flags)?;
        // SAFETY: `f` is not NULL; `status` may be.
        unsafe {
            f.write(found);
            if !status.is_null() {
                status.write(c_int::from(found.is_null()));
            }
        }
        Ok(())
    }
}
