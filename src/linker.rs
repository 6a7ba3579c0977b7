//! The dynamic linker, past our own `dlsym`.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The address of libc's `dlsym`, for the hook that jumps to it; 0 until it was looked for.
pub static REAL_DLSYM: AtomicUsize = AtomicUsize::new(0);

/// libc's `dlsym`. Aborts where there is none: then nothing in the process can be looked up.
#[cold]
pub extern "C" fn find_dlsym() -> usize {
    let versions = [c"GLIBC_2.34", c"GLIBC_2.2.5"];
    // SAFETY: plain look-ups of NUL-terminated names after this library.
    let found = versions.iter().map(|v| unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), v.as_ptr()) });
    let Some(found) = found.into_iter().find(|p| !p.is_null()) else { std::process::abort() };
    REAL_DLSYM.store(found as usize, Relaxed);
    found as usize
}

/// What libc's `dlsym` says, asked by this library.
pub fn dlsym(handle: *mut c_void, name: &CStr) -> Option<usize> {
    let known = REAL_DLSYM.load(Relaxed);
    let real = if known != 0 { known } else { find_dlsym() };
    // SAFETY: `real` is libc's dlsym, whose signature this is.
    let real: unsafe extern "C" fn(*mut c_void, *const libc::c_char) -> *mut c_void =
        unsafe { std::mem::transmute(real) };
    // SAFETY: a handle of dlopen, or one of the linker's own, and a NUL-terminated name.
    let found = unsafe { real(handle, name.as_ptr()) };
    (!found.is_null()).then_some(found as usize)
}

/// A handle of a library that is loaded already; None when it is not. Never loads anything.
pub fn loaded(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a NUL-terminated name. NOLOAD runs no constructor.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    (!handle.is_null()).then_some(handle)
}

/// The file that holds `address`.
pub fn path_of(address: usize) -> Option<std::path::PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    // SAFETY: the struct is plain data, dladdr takes any address, and a name that it gives is NUL-terminated.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(address as *const c_void, &mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        Some(std::ffi::OsStr::from_bytes(CStr::from_ptr(info.dli_fname).to_bytes()).into())
    }
}

/// Where the object that holds `address` begins.
pub fn base_of(address: usize) -> Option<usize> {
    // SAFETY: the struct is plain data, and dladdr takes any address.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        (libc::dladdr(address as *const c_void, &mut info) != 0).then_some(info.dli_fbase as usize)
    }
}

/// The definition of `name` that comes after this library's: in the global scope, else in a library named like `soname` that was
/// loaded out of sight.
pub fn next(name: &CStr, soname: &str) -> Option<usize> {
    dlsym(libc::RTLD_NEXT, name).or_else(|| dlsym(hidden(soname)?, name))
}

/// A loaded library whose file name begins with `soname`.
fn hidden(soname: &str) -> Option<*mut c_void> {
    struct Search<'a> {
        soname: &'a str,
        found: Option<std::ffi::CString>,
    }
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _size: usize, data: *mut c_void) -> libc::c_int {
        // SAFETY: dl_iterate_phdr passes a live entry and the pointer it was given.
        let (name, search) = unsafe { (CStr::from_ptr((*info).dlpi_name), &mut *(data as *mut Search)) };
        let file = name.to_bytes().rsplit(|&b| b == b'/').next().unwrap_or_default();
        if file.starts_with(search.soname.as_bytes()) {
            search.found = Some(name.to_owned());
            return 1;
        }
        0
    }
    let mut search = Search { soname, found: None };
    // SAFETY: the callback gets the pointer to `search`, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    loaded(&search.found?)
}
