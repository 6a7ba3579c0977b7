//! Who gets ours instead of the driver's.
//!
//! The real resolver is asked first, and its answer exchanged by *address*: a map from every exported variant of each function served
//! to ours, built once when the driver is there. Names, versions and flags then come out right by construction.
//!
//! `dlsym` is written in assembly (`arch.rs`). It jumps into libc's with the stack as it was, so that `RTLD_NEXT` still sees who
//! asked; only names that begin with `cu` take the longer way.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::Ordering::Relaxed;

use once_cell::sync::OnceCell;

use super::hooks::hooks;
use super::{memory, order};
use crate::linker;

#[cfg(not(test))]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    crate::arch::dlsym_body!(linker::REAL_DLSYM, cuda_symbol, linker::find_dlsym)
}

/// Ours for the symbol, or what the real resolver says of it; NULL leaves the question to libc's dlsym.
#[cfg_attr(test, allow(dead_code))]
extern "C" fn cuda_symbol(handle: *mut c_void, name: *const c_char, caller: usize) -> *mut c_void {
    crate::ffi::guard::guard(std::ptr::null_mut(), || {
        // Relative look-ups depend on who asks, and find this library by its place among the others.
        let relative = handle == libc::RTLD_NEXT || handle == libc::RTLD_DEFAULT;
        // Not every name that begins so is CUDA's: without a driver no setting is read, or warned of.
        if relative || served().is_none() || !super::active() {
            return std::ptr::null_mut();
        }
        // SAFETY: dlsym's caller passes a NUL-terminated name.
        let found = linker::dlsym(handle, unsafe { CStr::from_ptr(name) });
        let Some(found) = found else { return std::ptr::null_mut() };
        match ours(found) {
            // The driver's own look-ups find its own functions.
            Some(ours) if linker::base_of(caller) != linker::base_of(found) => ours as *mut c_void,
            _ => found as *mut c_void,
        }
    })
}

/// What stands in for the driver's function at `address`.
fn ours(address: usize) -> Option<usize> {
    served()?.get(&address).copied()
}

/// The driver's functions that are served: their addresses, and ours; none where the doors do not serve. None while no driver is loaded.
fn served() -> Option<&'static HashMap<usize, usize>> {
    static SERVED: OnceCell<HashMap<usize, usize>> = OnceCell::new();
    SERVED
        .get_or_try_init(|| {
            let driver = linker::loaded(c"libcuda.so.1").ok_or(())?;
            let mut map = HashMap::new();
            if !super::active() {
                return Ok(map);
            }
            for hook in [TABLE, memory::TABLE, order::TABLE].into_iter().flatten() {
                if let Some(real) = linker::dlsym(driver, hook.name) {
                    hook.real.store(real, Relaxed);
                    map.insert(real, (hook.ours)() as usize);
                }
            }
            Ok::<_, ()>(map)
        })
        .ok()
}

/// Exchanges a successful answer.
fn exchange(code: u32, found: *mut *mut c_void) -> u32 {
    if code == 0 && !found.is_null() {
        // SAFETY: the driver just wrote there.
        unsafe {
            if let Some(ours) = ours(*found as usize) {
                *found = ours as *mut c_void;
            }
        }
    }
    code
}

hooks! {
    table TABLE;
    fn [cuGetProcAddress] (name: *const c_char, found: *mut *mut c_void, version: c_int, flags: u64) = |real, _name| {
        exchange(real(name, found, version, flags), found)
    };
    fn [cuGetProcAddress_v2] (
        name: *const c_char, found: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int
    ) = |real, _name| exchange(real(name, found, version, flags, status), found);
}
