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
//! # Frees that name no stream
//! The real cudaFree is a barrier over all streams. Such a free is a closing of its own ([`Fences::mark`]): the epoch is counted up
//! and the *open event* recorded, anew at every free, so that it covers what was given to the device up to the latest free and
//! nothing after it. [`Fences::bar`] makes all later work of the context wait for that event, on the device: from then on what was
//! freed before is *ordered*, and any stream may have it, although it may not be finished.
//!
//! Drivers without `cuCtxRecordEvent` (before CUDA 12.5) have no such event: there nothing finishes until somebody waits,
//! and waiting is `cuCtxSynchronize`.

use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use parking_lot::RwLock;

use crate::driver::{Context, CuError, CuResult, CurrentContext, Driver, Event, Stream};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// Streams being captured, as far as the doors see: while there is one, neither an event of a context nor a wait for one may be asked
/// for (each answers 900, and the capture is lost). Whoever makes such a call holds this for reading, so that a capture begins either
/// before, and is seen, or after the call.
static CAPTURES: RwLock<Vec<usize>> = RwLock::new(Vec::new());

/// How many there are, for who only wants to know whether there is one.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// A stream is about to be captured.
pub fn capture_begins(s: Stream) {
    let mut captures = CAPTURES.write();
    captures.push(s.0);
    COUNT.store(captures.len(), Ordering::Release);
}

/// The capture of a stream ended, or did not begin, or the stream died.
pub fn capture_ends(s: Stream) {
    let mut captures = CAPTURES.write();
    if let Some(at) = captures.iter().position(|&c| c == s.0) {
        captures.swap_remove(at);
        COUNT.store(captures.len(), Ordering::Release);
    }
}

/// Whether a capture that the doors saw goes on.
#[inline]
pub fn capturing() -> bool {
    COUNT.load(Ordering::Acquire) > 0
}

/// Makes a call that no capture may see; 900 while there is one.
fn outside_captures<T>(call: impl FnOnce() -> CuResult<T>) -> CuResult<T> {
    let captures = CAPTURES.read();
    if captures.is_empty() { call() } else { Err(CuError::CAPTURE_UNSUPPORTED) }
}

/// Events kept that are not yet seen done.
const MAX_KEPT: usize = 64;

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
    /// Every epoch up to this one is done before any work that the context was given since.
    barred: AtomicU64,
    pending: Mutex<Events>,
    open: Mutex<Open>,
    recorded: AtomicU64,
    waited: AtomicU64,
}

/// The event of the frees that named no stream since the last bar. A leaf lock, held across no driver call.
#[derive(Default)]
struct Open {
    event: Option<Event>,
    /// Tells one open event from the next.
    turn: u64,
    /// The latest epoch that a finished record of the event covers; 0: none yet.
    covered: u64,
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
            barred: AtomicU64::new(0),
            pending: Mutex::new(Events::default()),
            open: Mutex::default(),
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

    /// The latest *ordered* epoch: all work that the context is given from now on comes after everything up to it. Grows with every bar,
    /// poll or wait that changed something. No driver call.
    pub fn ordered(&self) -> u64 {
        self.barred.load(Ordering::Acquire).max(self.finished())
    }

    /// The latest finished epoch: grows with every poll or wait that saw something end.
    pub fn finished(&self) -> u64 {
        self.finished.load(Ordering::Acquire)
    }

    /// Events recorded so far, and host waits.
    pub fn counts(&self) -> (u64, u64) {
        (self.recorded.load(Ordering::Relaxed), self.waited.load(Ordering::Relaxed))
    }

    /// The stamp of a free that names no stream: what was given to the device so far, on every stream, and no more. Where that cannot be
    /// recorded the stamp waits for the next closing. Must not be called while a stream of the context is being captured.
    pub fn mark(&self) -> u64 {
        loop {
            let stamp = self.epoch.fetch_add(1, Ordering::AcqRel);
            self.stamped.fetch_max(stamp, Ordering::AcqRel);
            let (event, turn) = {
                let open = self.open.lock();
                (open.event, open.turn)
            };
            let Some(event) = event.or_else(|| self.new_open(turn)) else { return stamp };
            if let Err(e) = outside_captures(|| self.driver.ctx_record_event(self.ctx, event)) {
                log::debug!("a free could not be recorded: {e:?}");
                return stamp;
            }
            self.recorded.fetch_add(1, Ordering::Relaxed);
            let mut open = self.open.lock();
            if open.turn == turn {
                open.covered = open.covered.max(stamp);
                return stamp;
            }
            // Somebody barred meanwhile, perhaps before this record: it counts for the next event.
        }
    }

    #[cold]
    fn new_open(&self, turn: u64) -> Option<Event> {
        let event = self.spare_event().inspect_err(|e| log::debug!("no event for a free: {e:?}")).ok()?;
        let mut open = self.open.lock();
        if open.turn == turn && open.event.is_none() && !self.pending.lock().dead {
            open.event = Some(event);
            return Some(event);
        }
        let there = open.event.filter(|_| open.turn == turn);
        drop(open);
        self.pending.lock().spare.push(event);
        // Not this turn's: recorded or not, it counts for nothing and the caller comes back.
        there.or(Some(event))
    }

    /// All later work of the context waits, on the device, for every free that was marked so far. False when there was none. Must not
    /// be called while a stream of the context is being captured.
    pub fn bar(&self) -> CuResult<bool> {
        let Some((covered, event)) = self.take_open() else { return Ok(false) };
        let waits = outside_captures(|| self.driver.ctx_wait_event(self.ctx, event));
        if waits.is_ok() {
            self.barred.fetch_max(covered, Ordering::AcqRel);
        }
        // Barred or not, the event tells when those frees are finished.
        self.push_pending(covered, event);
        waits.map(|()| true)
    }

    fn take_open(&self) -> Option<(u64, Event)> {
        let mut open = self.open.lock();
        if open.covered == 0 {
            return None;
        }
        let taken = open.event.take().map(|event| (open.covered, event));
        open.covered = 0;
        open.turn += 1;
        taken
    }

    fn push_pending(&self, epoch: u64, event: Event) {
        self.covered.fetch_max(epoch, Ordering::AcqRel);
        let mut events = self.pending.lock();
        if events.dead {
            return;
        }
        // Two closers may arrive in either order; each event covers its own epoch and all before it.
        events.pending.push_back((epoch, event));
        if events.pending.len() > MAX_KEPT {
            // A later event tells what an earlier one does, only later: every other one will do.
            let mut keep = false;
            let all = std::mem::take(&mut events.pending);
            let last = all.len() - 1;
            for (i, (epoch, event)) in all.into_iter().enumerate() {
                keep = !keep;
                if keep || i == last {
                    events.pending.push_back((epoch, event));
                } else {
                    events.spare.push(event);
                }
            }
        }
    }

    fn spare_event(&self) -> CuResult<Event> {
        let spare = self.pending.lock().spare.pop();
        spare.map_or_else(
            || {
                let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
                self.driver.event_create()
            },
            Ok,
        )
    }

    /// What was marked so far is recorded already: its event can be polled from now on.
    pub fn seal(&self) -> CuResult<()> {
        if let Some((covered, event)) = self.take_open() {
            self.push_pending(covered, event);
        }
        Ok(())
    }

    /// Closes the open epoch: records an event that covers every stamp handed out so far. Does nothing when all are covered,
    /// or where the driver has no such event. Must not be called while a stream of the context is being captured: the driver
    /// answers 900 and the capture is lost.
    pub fn close(&self) -> CuResult<()> {
        self.seal()?;
        if self.stamped.load(Ordering::Acquire) <= self.covered.load(Ordering::Acquire) || !self.driver.has_ctx_fences()
        {
            return Ok(());
        }
        let event = self.spare_event()?;
        let closed = self.epoch.fetch_add(1, Ordering::AcqRel);
        if let Err(e) = outside_captures(|| self.driver.ctx_record_event(self.ctx, event)) {
            // The epoch stays uncovered; the next event that is recorded covers it.
            self.pending.lock().spare.push(event);
            return Err(e);
        }
        self.recorded.fetch_add(1, Ordering::Relaxed);
        self.push_pending(closed, event);
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
        drop(events);
        let mut open = self.open.lock();
        *open = Open { turn: open.turn + 1, ..Open::default() };
    }

    /// Destroys the events; nothing may be stamped or waited for afterwards. The context must be alive.
    pub fn destroy_events(&self) {
        let open = self.open.lock().event.take();
        let events = {
            let mut events = self.pending.lock();
            events.dead = true;
            let pending = std::mem::take(&mut events.pending).into_iter().map(|(_, event)| event);
            pending.chain(std::mem::take(&mut events.spare)).chain(open).collect::<Vec<_>>()
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
        outside_captures(|| Ok(()))?;
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
