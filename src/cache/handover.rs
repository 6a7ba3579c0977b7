//! One owner, who comes in and out all the time and must pay next to nothing for it; and now and then somebody else, who must find the
//! owner outside and keep it there.
//!
//! Dekker's agreement, with the whole price on the rare side: the owner says that it is in and then looks whether it is wanted out; the
//! other says that the owner is wanted out and then looks whether it is in. Between the two steps each needs a full barrier. The
//! owner's is only a compiler barrier; the other makes the owner's processor execute one, by `membarrier(2)`.

use crate::sync::{AtomicBool, Barrier, Mutex, Ordering, pause};

pub struct Handover {
    inside: AtomicBool,
    wanted: AtomicBool,
    turn: Mutex<()>,
    barrier: Barrier,
}

impl Handover {
    pub fn new(barrier: Barrier) -> Handover {
        Handover { inside: AtomicBool::new(false), wanted: AtomicBool::new(false), turn: Mutex::new(()), barrier }
    }

    /// The owner comes in; false when somebody else is at it. Only the owner calls this, and it is out.
    #[inline]
    pub fn enter(&self) -> bool {
        self.inside.store(true, Ordering::Relaxed);
        self.barrier.light();
        if !self.wanted.load(Ordering::Acquire) {
            return true;
        }
        self.leave();
        false
    }

    #[inline]
    pub fn leave(&self) {
        self.inside.store(false, Ordering::Release);
    }

    /// The owner comes in, after whoever is at it.
    pub fn enter_slow(&self) {
        while !self.enter() {
            drop(self.turn.lock());
            pause();
        }
    }

    /// Runs `act` while the owner is out. The owner must not call this from inside.
    pub fn while_out<R>(&self, act: impl FnOnce() -> R) -> R {
        let _turn = self.turn.lock();
        self.wanted.store(true, Ordering::Relaxed);
        self.barrier.heavy();
        while self.inside.load(Ordering::Acquire) {
            pause();
        }
        let result = act();
        self.wanted.store(false, Ordering::Release);
        result
    }
}
