//! What the lock-free parts are made of, apart so that a model checker can put its own in their place (`tests/model`).

pub use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub use parking_lot::Mutex;

/// Lets others run.
pub fn pause() {
    std::thread::yield_now();
}

/// A full barrier between two threads of which one pays nothing.
#[derive(Clone, Copy)]
pub struct Barrier {
    by_system: bool,
}

impl Barrier {
    pub fn new() -> Barrier {
        use once_cell::sync::Lazy;
        static BY_SYSTEM: Lazy<bool> = Lazy::new(|| membarrier(REGISTER_PRIVATE_EXPEDITED));
        Barrier { by_system: *BY_SYSTEM }
    }

    /// The frequent side.
    #[inline]
    pub fn light(&self) {
        if self.by_system {
            std::sync::atomic::compiler_fence(Ordering::SeqCst);
        } else {
            std::sync::atomic::fence(Ordering::SeqCst);
        }
    }

    /// The rare side.
    pub fn heavy(&self) {
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.by_system && !membarrier(PRIVATE_EXPEDITED) {
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
