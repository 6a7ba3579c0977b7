//! What `src/sync.rs` is to the library, made of loom.

pub use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// loom's mutex, with the interface of the library's.
#[derive(Default)]
pub struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub fn new(value: T) -> Mutex<T> {
        Mutex(loom::sync::Mutex::new(value))
    }
    pub fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
        self.0.lock().unwrap()
    }
}

pub fn pause() {
    loom::thread::yield_now();
}

/// `membarrier` makes the other side's compiler barrier a full one: in the model both sides have theirs.
#[derive(Clone, Copy)]
pub struct Barrier;

impl Barrier {
    pub fn light(&self) {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
    pub fn heavy(&self) {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}
