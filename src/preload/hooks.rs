//! `hooks!`: functions of CUDA that this library exports under their own names. Each variant of a name (`_v2`, `_ptds`, `_ptsz`) is
//! a function of its own that knows the one it stands before.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// One exported variant.
pub struct Hook {
    pub name: &'static CStr,
    pub ours: fn() -> *const c_void,
    /// The definition after ours; 0 until it is known.
    pub real: &'static AtomicUsize,
}

/// The address that `real` keeps, looked up at first need. None where there is no such function.
#[inline]
pub fn real(slot: &AtomicUsize, name: &CStr) -> Option<usize> {
    match slot.load(Relaxed) {
        0 => find(slot, name),
        known => Some(known),
    }
}

#[cold]
fn find(slot: &AtomicUsize, name: &CStr) -> Option<usize> {
    let found = crate::linker::next(name, super::library(name))?;
    slot.store(found, Relaxed);
    Some(found)
}

/// ```text
/// hooks! {
///     table TABLE;
///     fn [cuMemAlloc_v2] (ptr: *mut u64, size: usize) = |real| body;
/// }
/// ```
/// defines the exported functions and `TABLE` of them. The body runs inside the panic guard, and only where the library serves; `real`
/// calls the definition after ours. An answer of the body is a `CUresult` or a `cudaError_t`.
macro_rules! hooks {
    (table $table:ident; $($(#[$meta:meta])* fn [$($variant:ident),+] $args:tt = |$real:ident, $name:ident| $body:expr;)*) => {
        $($($crate::preload::hooks::hook!($variant $args |$real, $name| $body);)+)*
        #[allow(dead_code)]
        pub static $table: &[$crate::preload::hooks::Hook] = &[$($($crate::preload::hooks::Hook {
            name: $variant::NAME,
            ours: || $variant as *const std::ffi::c_void,
            real: &$variant::REAL,
        },)+)*];
    };
}

macro_rules! hook {
    ($variant:ident ($($arg:ident: $t:ty),*) |$real:ident, $name:ident| $body:expr) => {
        #[allow(non_snake_case)]
        mod $variant {
            pub const NAME: &std::ffi::CStr = match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($variant), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => unreachable!(),
            };
            pub static REAL: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        }
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[allow(non_snake_case)]
        pub unsafe extern "C" fn $variant($($arg: $t),*) -> u32 {
            let Some(address) = $crate::preload::hooks::real(&$variant::REAL, $variant::NAME) else {
                return $crate::preload::NOT_FOUND;
            };
            // SAFETY: the function of that name, whose signature this is; the arguments are the caller's own.
            let $real = |$($arg: $t),*| unsafe {
                std::mem::transmute::<usize, unsafe extern "C" fn($($t),*) -> u32>(address)($($arg),*)
            };
            if !$crate::preload::active() {
                return $real($($arg),*);
            }
            #[allow(unused_variables)]
            let $name = stringify!($variant);
            $crate::ffi::guard::guard(999, || $body)
        }
    };
}

pub(super) use {hook, hooks};
