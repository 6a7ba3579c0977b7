//! The one wrapper around every exported function.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::codes::{Answer, DEINITIALIZED, NOT_INITIALIZED, NOT_PERMITTED, SUCCESS, UNKNOWN};
use crate::{fault, trace};

/// An exported function: its name and how often it was called.
pub struct Site {
    name: &'static str,
    calls: AtomicU64,
    listed: AtomicBool,
    /// Answers in any state of the process: before `cuInit`, in a forked child, after exit began.
    any_time: bool,
}

static SITES: Mutex<Vec<&'static Site>> = Mutex::new(Vec::new());

static INITIALIZED: AtomicBool = AtomicBool::new(false);
static EXITING: AtomicBool = AtomicBool::new(false);
static FORKED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Set while a host function runs on this thread: it must not call the driver.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

impl Site {
    pub const fn new(name: &'static str, any_time: bool) -> Site {
        Site { name, calls: AtomicU64::new(0), listed: AtomicBool::new(false), any_time }
    }

    fn count(&'static self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if !self.listed.swap(true, Ordering::Relaxed) {
            SITES.lock().push(self);
        }
    }
}

pub fn enter(site: &'static Site, body: impl FnOnce() -> Answer) -> u32 {
    let code = answer(site, body);
    // A forked child shares the file and holds no lock of ours: tracing it is safe.
    trace::line(site.name, code);
    code
}

fn answer(site: &'static Site, body: impl FnOnce() -> Answer) -> u32 {
    if !site.any_time {
        if FORKED.load(Ordering::Acquire) {
            return NOT_INITIALIZED.0;
        }
        if EXITING.load(Ordering::Acquire) {
            return DEINITIALIZED.0;
        }
    }
    site.count();
    if let Some(code) = fault::due(site.name) {
        return code;
    }
    if !site.any_time {
        if !INITIALIZED.load(Ordering::Acquire) {
            return NOT_INITIALIZED.0;
        }
        if IN_HOST_FUNCTION.get() {
            return NOT_PERMITTED.0;
        }
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(code)) => code.0,
        Err(_) => UNKNOWN.0,
    }
}

/// Calls of a function, named with or without its suffixes, since the start or the last `reset_counts`.
pub fn count(name: &str) -> u64 {
    let sites = SITES.lock();
    sites.iter().filter(|site| fault::names(name, site.name)).map(|site| site.calls.load(Ordering::Relaxed)).sum()
}

pub fn reset_counts() {
    for site in SITES.lock().iter() {
        site.calls.store(0, Ordering::Relaxed);
    }
}

pub fn forked() -> bool {
    FORKED.load(Ordering::Acquire)
}

pub fn exiting() -> bool {
    EXITING.load(Ordering::Acquire)
}

/// Marks the driver as initialised. The first time it registers what must happen at exit and at fork.
pub fn initialize() {
    extern "C" fn at_exit() {
        EXITING.store(true, Ordering::Release);
    }
    extern "C" fn in_child() {
        FORKED.store(true, Ordering::Release);
    }
    if !INITIALIZED.swap(true, Ordering::AcqRel) {
        // SAFETY: both functions only store to an atomic, which is allowed at exit and in a forked child.
        unsafe {
            libc::atexit(at_exit);
            libc::pthread_atfork(None, None, Some(in_child));
        }
    }
}

pub fn in_host_function(run: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    run();
    IN_HOST_FUNCTION.set(false);
}

/// Defines exported functions. Each is `fn name(arguments) { body }`, the body giving an `Answer`.
///
/// `any_time fn` answers in every state of the process. `fn name | name_pt (arguments), null => { body }` defines two: in the
/// second the NULL stream is the calling thread's own; `null` says which.
macro_rules! driver_fns {
    () => {};
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block $($rest:tt)*) => {
        $crate::call::driver_fns! { @one $name, false, ($($arg: $ty),*), [$(#[$doc])*], $body }
        $crate::call::driver_fns! { $($rest)* }
    };
    ($(#[$doc:meta])* any_time fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block $($rest:tt)*) => {
        $crate::call::driver_fns! { @one $name, true, ($($arg: $ty),*), [$(#[$doc])*], $body }
        $crate::call::driver_fns! { $($rest)* }
    };
    ($(#[$doc:meta])* fn $name:ident | $pt:ident($($arg:ident: $ty:ty),* $(,)?), $null:ident => $body:block $($rest:tt)*) => {
        $crate::call::driver_fns! { @one $name, false, ($($arg: $ty),*), [$(#[$doc])*], {
            let $null = $crate::stream::Null::Legacy;
            $body
        } }
        $crate::call::driver_fns! { @one $pt, false, ($($arg: $ty),*), [$(#[$doc])*], {
            let $null = $crate::stream::Null::PerThread;
            $body
        } }
        $crate::call::driver_fns! { $($rest)* }
    };
    (@one $name:ident, $any_time:literal, ($($arg:ident: $ty:ty),*), [$($doc:tt)*], $body:block) => {
        $($doc)*
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> u32 {
            static SITE: $crate::call::Site = $crate::call::Site::new(stringify!($name), $any_time);
            $crate::call::enter(&SITE, || $body)
        }
    };
}
pub(crate) use driver_fns;
