//! Counters of the doors, for the report at exit. The pools count what they serve; what did not come in by a door that counts here
//! came in by the gpupool door.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub struct Door {
    pub mallocs: AtomicU64,
    pub frees: AtomicU64,
    /// Passed on to CUDA: what is not served, and memory that did not come from a pool.
    pub foreign_mallocs: AtomicU64,
    pub foreign_frees: AtomicU64,
}

impl Door {
    const fn new() -> Door {
        Door {
            mallocs: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            foreign_mallocs: AtomicU64::new(0),
            foreign_frees: AtomicU64::new(0),
        }
    }

    pub fn counts(&self) -> [u64; 4] {
        [&self.mallocs, &self.frees, &self.foreign_mallocs, &self.foreign_frees].map(|n| n.load(Relaxed))
    }
}

pub static RUNTIME: Door = Door::new();
pub static DRIVER: Door = Door::new();
/// Nothing is foreign to it: what it does not serve is an error.
pub static CNMEM: Door = Door::new();
/// Pinned allocations, and those of them that were kept from before.
pub static PINNED: AtomicU64 = AtomicU64::new(0);
pub static PINNED_HITS: AtomicU64 = AtomicU64::new(0);

pub fn count(n: &AtomicU64) {
    n.fetch_add(1, Relaxed);
}
