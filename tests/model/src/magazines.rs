//! The hand-over of magazines: a thread that comes in and out, and others that empty them.

use loom::cell::UnsafeCell;
use loom::sync::Arc;

use crate::handover::Handover;
use crate::sync::Barrier;

struct Desk {
    handover: Handover,
    /// loom fails the test when two threads are at it at once.
    blocks: UnsafeCell<u32>,
}

// SAFETY: `blocks` is guarded by `handover`, which is what is checked.
unsafe impl Sync for Desk {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Desk {}

fn model(others: usize, steps: usize) {
    let mut bounded = loom::model::Builder::new();
    bounded.preemption_bound = Some(3);
    bounded.check(move || {
        let desk = Arc::new(Desk { handover: Handover::new(Barrier), blocks: UnsafeCell::new(1) });
        let drains: Vec<_> = (0..others)
            .map(|_| {
                let desk = desk.clone();
                // SAFETY: the owner is kept out.
                loom::thread::spawn(move || desk.handover.while_out(|| desk.blocks.with_mut(|n| unsafe { *n = 0 })))
            })
            .collect();
        for _ in 0..steps {
            if !desk.handover.enter() {
                desk.handover.enter_slow();
            }
            // SAFETY: the owner is in.
            desk.blocks.with_mut(|n| unsafe { *n += 1 });
            desk.handover.leave();
        }
        drains.into_iter().for_each(|d| d.join().unwrap());
        // SAFETY: nobody else is left.
        assert!(desk.blocks.with(|n| unsafe { *n }) <= 1 + steps as u32);
    });
}

#[test]
fn nobody_is_in_while_somebody_drains() {
    model(1, 2);
}

#[test]
fn two_drain_at_once() {
    model(2, 1);
}
