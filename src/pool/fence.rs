//! Fences: what has finished on the device, without an event per free.
//!
//! Time in a context is cut into *epochs*. A free reads the current epoch as its *stamp* and touches nothing else. When
//! somebody wants memory that another stream freed, the epoch is *closed*: it is counted up, and then one event is recorded
//! that covers everything submitted to the context so far (`cuCtxRecordEvent`: every stream, destroyed ones too, 0.3 to
//! 0.7 us however many there are). Once that event is done, every free with that stamp or an earlier one has *finished*:
//! anyone may have the memory.
//!
//! Why it holds: a thread submits work, then frees (reads the epoch). A closer first counts the epoch up and then records.
//! A stamp at or under the closed epoch was read before the counting up, so its work was submitted before the record.
//!
//! Drivers without `cuCtxRecordEvent` (before CUDA 12.5) have no such event: there nothing finishes until somebody waits,
//! and waiting is `cuCtxSynchronize`.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::driver::{Context, CuResult, CurrentContext, Driver, Event};

pub struct Fences {
    driver: &'static Driver,
    ctx: Context,
    /// The open epoch; stamps are read from it. Starts at 1: stamp 0 was never used by any work.
    epoch: AtomicU64,
    /// The latest epoch that some free was stamped with.
    stamped: AtomicU64,
    /// The latest epoch that a recorded event (or a host wait) covers.
    covered: AtomicU64,
    /// Every epoch up to this one is complete on the device.
    finished: AtomicU64,
    pending: Mutex<Events>,
    recorded: AtomicU64,
    waited: AtomicU64,
}

/// Events recorded and not yet seen done, oldest first, and events to record anew. The lock is a leaf: taken last, and held
/// across no driver call.
#[derive(Default)]
struct Events {
    pending: VecDeque<(u64, Event)>,
    spare: Vec<Event>,
    /// Events that a thread has taken out to query or to wait for.
    in_hand: usize,
    /// The context died: events are no longer kept.
    dead: bool,
}

impl Events {
    fn take(&mut self, at: usize) -> Option<(u64, Event)> {
        let taken = self.pending.remove(at);
        self.in_hand += usize::from(taken.is_some());
        taken
    }
}

impl Fences {
    pub fn new(driver: &'static Driver, ctx: Context) -> Fences {
        Fences {
            driver,
            ctx,
            epoch: AtomicU64::new(1),
            stamped: AtomicU64::new(0),
            covered: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            pending: Mutex::new(Events::default()),
            recorded: AtomicU64::new(0),
            waited: AtomicU64::new(0),
        }
    }

    /// The stamp for a free made now. Call it after the work before the free was submitted, on the thread that frees.
    #[inline]
    pub fn stamp(&self) -> u64 {
        // Acquire: nothing that follows the free moves before the read. The work's own submission came before through the
        // driver's locks.
        let now = self.epoch.load(Ordering::Acquire);
        if self.stamped.load(Ordering::Relaxed) < now {
            self.stamped.fetch_max(now, Ordering::AcqRel);
        }
        now
    }

    /// Whether everything up to `stamp` is complete, as far as the last poll saw. No driver call.
    #[inline]
    pub fn is_finished(&self, stamp: u64) -> bool {
        stamp <= self.finished.load(Ordering::Acquire)
    }

    /// The latest finished epoch: grows with every poll or wait that saw something end.
    pub fn finished(&self) -> u64 {
        self.finished.load(Ordering::Acquire)
    }

    /// Events recorded so far, and host waits.
    pub fn counts(&self) -> (u64, u64) {
        (self.recorded.load(Ordering::Relaxed), self.waited.load(Ordering::Relaxed))
    }

    /// Closes the open epoch: records an event that covers every stamp handed out so far. Does nothing when all are covered,
    /// or where the driver has no such event. Must not be called while a stream of the context is being captured: the driver
    /// answers 900 and the capture is lost.
    pub fn close(&self) -> CuResult<()> {
        if self.stamped.load(Ordering::Acquire) <= self.covered.load(Ordering::Acquire) || !self.driver.has_ctx_fences()
        {
            return Ok(());
        }
        let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
        let spare = self.pending.lock().spare.pop();
        let event = match spare {
            Some(e) => e,
            None => self.driver.event_create()?,
        };
        let closed = self.epoch.fetch_add(1, Ordering::AcqRel);
        if let Err(e) = self.driver.ctx_record_event(self.ctx, event) {
            // The epoch stays uncovered; the next event that is recorded covers it.
            self.pending.lock().spare.push(event);
            return Err(e);
        }
        self.recorded.fetch_add(1, Ordering::Relaxed);
        self.covered.fetch_max(closed, Ordering::AcqRel);
        let mut events = self.pending.lock();
        if !events.dead {
            // Two closers may arrive in either order; each event covers its own epoch and all before it.
            events.pending.push_back((closed, event));
        }
        Ok(())
    }

    /// Asks the driver which recorded events are done, oldest first, until one is not.
    pub fn poll(&self) -> CuResult<()> {
        loop {
            let Some((epoch, event)) = self.pending.lock().take(0) else {
                return Ok(());
            };
            match self.driver.event_query(event) {
                Ok(true) => self.retire(epoch, event),
                other => {
                    self.put_back(epoch, event);
                    return other.map(|_| ());
                }
            }
        }
    }

    /// Events recorded and not yet seen done.
    pub fn pending(&self) -> usize {
        self.pending.lock().pending.len()
    }

    /// Blocks the host until everything stamped up to `stamp` is complete. 900 while a stream of the context is captured.
    pub fn wait(&self, stamp: u64) -> CuResult<()> {
        if self.is_finished(stamp) {
            return Ok(());
        }
        if !self.driver.has_ctx_fences() {
            return self.synchronize();
        }
        if self.covered.load(Ordering::Acquire) < stamp {
            self.close()?;
        }
        while !self.is_finished(stamp) {
            // The first event that covers the stamp; later ones need not be waited for.
            let taken = {
                let mut events = self.pending.lock();
                let at = events.pending.iter().position(|&(epoch, _)| epoch >= stamp);
                at.and_then(|at| events.take(at)).ok_or(events.in_hand)
            };
            let (epoch, event) = match taken {
                Ok(taken) => taken,
                Err(0) => return self.synchronize(),
                Err(_) => {
                    // Another thread asks or waits for the event that covers the stamp.
                    std::thread::sleep(Duration::from_micros(20));
                    continue;
                }
            };
            self.waited.fetch_add(1, Ordering::Relaxed);
            let done = self.driver.event_synchronize(event);
            match done {
                Ok(()) => self.retire(epoch, event),
                Err(e) => {
                    self.put_back(epoch, event);
                    return Err(e);
                }
            }
        }
        Ok(())
    }

    /// The context is dead: its events died with it, and so did all work.
    pub fn drop_all(&self) {
        let mut events = self.pending.lock();
        events.dead = true;
        events.pending.clear();
        events.spare.clear();
    }

    /// Destroys the events; nothing may be stamped or waited for afterwards. The context must be alive.
    pub fn destroy_events(&self) {
        let events = {
            let mut events = self.pending.lock();
            events.dead = true;
            let pending = std::mem::take(&mut events.pending).into_iter().map(|(_, event)| event);
            pending.chain(std::mem::take(&mut events.spare)).collect::<Vec<_>>()
        };
        for event in events {
            if let Err(e) = self.driver.event_destroy(event) {
                log::debug!("an event could not be destroyed: {e:?}");
            }
        }
    }

    fn synchronize(&self) -> CuResult<()> {
        let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
        let closed = self.epoch.fetch_add(1, Ordering::AcqRel);
        self.waited.fetch_add(1, Ordering::Relaxed);
        self.driver.ctx_synchronize()?;
        self.covered.fetch_max(closed, Ordering::AcqRel);
        self.finished.fetch_max(closed, Ordering::AcqRel);
        Ok(())
    }

    fn retire(&self, epoch: u64, event: Event) {
        self.finished.fetch_max(epoch, Ordering::AcqRel);
        let mut events = self.pending.lock();
        events.in_hand -= 1;
        if !events.dead {
            events.spare.push(event);
        }
    }

    fn put_back(&self, epoch: u64, event: Event) {
        let mut events = self.pending.lock();
        events.in_hand -= 1;
        if !events.dead {
            events.pending.push_front((epoch, event));
        }
    }
}
