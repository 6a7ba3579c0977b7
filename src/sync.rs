//! What the lock-free parts are made of, apart so that a model checker can put its own in their place (`tests/model`).

pub use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub use parking_lot::Mutex;

/// Lets others run.
pub fn pause() {
    std::thread::yield_now();
}

/// A full barrier between two threads of which one pays nothing. Only where `is_there`.
#[derive(Clone, Copy)]
pub struct Barrier;

impl Barrier {
    /// Whether the system can make other threads execute a barrier: Linux 4.14 and later.
    pub fn is_there() -> bool {
        use once_cell::sync::Lazy;
        static THERE: Lazy<bool> = Lazy::new(|| membarrier(REGISTER_PRIVATE_EXPEDITED));
        *THERE
    }

    pub fn new() -> Barrier {
        Barrier
    }

    /// The frequent side.
    #[inline]
    pub fn light(&self) {
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    }

    /// The rare side.
    pub fn heavy(&self) {
        std::sync::atomic::fence(Ordering::SeqCst);
        if !membarrier(PRIVATE_EXPEDITED) {
            // It was there when it was registered for: without it nothing holds.
            std::process::abort();
        }
    }
}

// From linux/membarrier.h.
const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: a system call on plain numbers.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}
