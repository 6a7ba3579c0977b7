//! The tree of managers behind the cnmem door: on every device a root, which serves the NULL stream, and a child for every
//! named stream. CNMeM's rules, kept exactly: sizes and placement in 512-byte units, memory moves between managers only by the
//! rules below, and every manager can say its total and its free bytes.
//!
//! All managers of a device share one `Space`. A manager is two owners in it: `ready`, memory that its stream may use at once,
//! and `parked`, memory that belongs to nobody's order until its fence is finished: freed on the NULL stream or on a per-thread
//! one, or left by a stream whose handle a new stream has now (live blocks too, until they are freed).
//!
//! # Where a manager's memory comes from, in this order
//! 1. its own ready memory; its own parked memory once finished;
//! 2. a child: the root's memory, once the work before its free is finished;
//! 3. unless `CANNOT_GROW`: the driver, through the root;
//! 4. unless `CANNOT_STEAL`: memory idle in the other managers, once finished;
//! 5. the same again after the host has waited for the work before those frees, the earliest first, where that can help.
//!
//! The mutex of a device is held across no driver call.

use std::fmt::Write;

use parking_lot::Mutex;

use crate::config::{self, Backing};
use crate::driver::{Context, CuError, CurrentContext, Driver, RelaxedCapture, Stream};
use crate::error::Error;
use crate::pool::fence::Fences;
use crate::pool::space::{BlockId, GRANULE, OwnerId, Space, round_up};
use crate::pool::table::Grain;
use crate::source::{self, Arena, Segment, Source, SourceKind};

/// What `cnmemInit` asks for one device. Sizes in bytes.
pub struct Request {
    pub ordinal: i32,
    /// 0: `GPUPOOL_INIT_PERCENT` of what is free.
    pub size: usize,
    /// Named streams and what is set aside for each.
    pub streams: Vec<(Stream, usize)>,
}

/// CNMeM's flags.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Rules {
    pub cannot_grow: bool,
    pub cannot_steal: bool,
    pub managed: bool,
}

/// The managers of one device.
pub struct Device {
    driver: &'static Driver,
    ordinal: i32,
    ctx: Context,
    rules: Rules,
    source: Box<dyn Source>,
    fences: Fences,
    books: Mutex<Books>,
}

struct Books {
    space: Space,
    /// Of the segments' addresses: the driver's own blocks may share what one leaf of the table is for.
    grain: Grain,
    /// The root first.
    managers: Vec<Manager>,
    segments: Vec<Segment>,
    /// The bases of the `Space`'s regions, one a segment.
    regions: Vec<u64>,
    /// What the source gave beyond what was asked (its granularity), in no manager yet; each goes on where its region ends.
    spare: Vec<(u64, usize)>,
}

#[derive(Clone, Copy)]
struct Manager {
    stream: Stream,
    /// Tells a new stream under an old handle; None until it was seen.
    stream_id: Option<u64>,
    ready: OwnerId,
    parked: OwnerId,
}

const ROOT: usize = 0;

impl Device {
    /// Takes the memory of `request` at once. `InvalidArgument` for a size that is not under the device's total;
    /// `OutOfMemory`, and nothing is held, for one that cannot be had.
    pub fn new(driver: &'static Driver, request: &Request, rules: Rules) -> Result<Device, Error> {
        let ordinal = request.ordinal;
        if request.size >= driver.device_total(ordinal)? {
            return Err(Error::InvalidArgument);
        }
        let ctx = driver.primary_retain(ordinal)?;
        let made = Device::in_context(driver, request, rules, ctx);
        if made.is_err() {
            driver.primary_release(ordinal)?;
        }
        made
    }

    fn in_context(driver: &'static Driver, request: &Request, rules: Rules, ctx: Context) -> Result<Device, Error> {
        let _ctx = CurrentContext::enter(driver, ctx)?;
        let ordinal = request.ordinal;
        let pages = config::get().backing == Backing::Vmm && driver.vmm_supported(ordinal);
        let source: Box<dyn Source> = if rules.managed {
            Box::new(source::managed(driver, ctx, ordinal))
        } else if pages {
            Box::new(source::vmm(driver, ordinal)?)
        } else {
            Box::new(source::device(driver, ctx, ordinal))
        };
        let too_much = || Error::OutOfMemory { asked: request.size, detail: None };
        let children = request.streams.iter().try_fold(0usize, |sum, s| sum.checked_add(round_up(s.1)?));
        let children = children.ok_or_else(too_much)?;
        let chosen = match request.size {
            0 => (driver.mem_info()?.0 as f64 * config::get().init_percent / 100.0) as usize,
            size => size,
        };
        let mut size = round_up(chosen).ok_or_else(too_much)?.max(GRANULE);
        if children > size {
            if rules.cannot_grow && request.size != 0 {
                return Err(too_much());
            }
            size = children;
        }
        // What can be refused comes before the memory is taken: a segment does not go back by itself.
        let mut space = Space::new().ok_or_else(too_much)?;
        let mut managers = Vec::new();
        let named = request.streams.iter().map(|s| s.0);
        for stream in std::iter::once(Stream::NULL).chain(named) {
            managers.push(Manager::new(&mut space, driver, ctx, stream)?);
        }
        let grain = if source.kind() == SourceKind::Vmm { Grain::Any } else { Grain::Granule };
        let segment = loop {
            match source.acquire(Arena::Large, size) {
                Ok(segment) => break segment,
                Err(CuError::OUT_OF_MEMORY) => {
                    let shrink = config::get().init_shrink.ok_or_else(too_much)?;
                    size = (size as f64 * shrink) as usize / GRANULE * GRANULE;
                    if size < children.max(GRANULE) {
                        return Err(too_much());
                    }
                    log::info!("device {ordinal}: trying {size} bytes");
                }
                Err(e) => return Err(e.into()),
            }
        };
        if space.add_region(segment.base, size, managers[ROOT].ready, grain).is_none() {
            source.release(segment)?;
            return Err(too_much());
        }
        for (child, &(_, bytes)) in managers[1..].iter().zip(&request.streams) {
            if let Some(bytes) = round_up(bytes).filter(|&b| b > 0) {
                let b = space.alloc(managers[ROOT].ready, bytes).expect("the root holds the sum of its children");
                space.free(b, child.ready, 0);
            }
        }
        let spare = (segment.size > size).then(|| (segment.base + size as u64, segment.size - size));
        let books = Books {
            space,
            grain,
            managers,
            regions: vec![segment.base],
            segments: vec![segment],
            spare: spare.into_iter().collect(),
        };
        let fences = Fences::new(driver, ctx);
        Ok(Device { driver, ordinal, ctx, rules, source, fences, books: Mutex::new(books) })
    }

    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Whether a child serves `s` here; the NULL stream is everywhere.
    pub fn serves(&self, s: Stream) -> bool {
        self.books.lock().manager(s).is_ok()
    }

    /// Whether `p` is the start of a live block here.
    pub fn holds(&self, p: u64) -> bool {
        self.books.lock().space.lookup(p).is_some()
    }

    /// Whether `s` is a stream of this device's context: only then do its fences cover the stream's work.
    pub fn owns(&self, s: Stream) -> bool {
        self.driver.stream_ctx(s) == Ok(self.ctx)
    }

    /// Makes a child for `s`, a stream that this device `owns`; does nothing when there is one.
    pub fn register(&self, s: Stream) -> Result<(), Error> {
        if self.serves(s) {
            return Ok(());
        }
        let id = stream_id(self.driver, s)?;
        let mut books = self.books.lock();
        if books.manager(s).is_err() {
            let (ready, parked) = (books.space.add_owner(), books.space.add_owner());
            books.managers.push(Manager { stream: s, stream_id: id, ready, parked });
        }
        Ok(())
    }

    // ---- malloc and free ----

    /// `size` over 0. `InvalidArgument` for a stream without a manager.
    pub fn malloc(&self, size: usize, s: Stream) -> Result<u64, Error> {
        let too_much = || Error::OutOfMemory { asked: size, detail: None };
        let size = round_up(size).ok_or_else(too_much)?;
        let id = stream_id(self.driver, s)?;
        let m = {
            let mut books = self.books.lock();
            let m = books.manager(s)?;
            books.notice(m, id);
            let ready = books.managers[m].ready;
            if let Some(b) = books.space.alloc(ready, size) {
                return Ok(books.space.addr(b));
            }
            m
        };
        self.malloc_slow(size, s, m)?.ok_or_else(too_much)
    }

    #[cold]
    #[inline(never)]
    fn malloc_slow(&self, size: usize, s: Stream, m: usize) -> Result<Option<u64>, Error> {
        let _ctx = CurrentContext::enter(self.driver, self.ctx)?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        let captured = |s| self.driver.stream_is_capturing(s).unwrap_or(true);
        let fenced = !captured(s) && !captured(Stream::LEGACY);
        if fenced {
            // Errors mean that nothing more is known to be finished; growing comes next all the same.
            let _ = self.fences.close().and_then(|()| self.fences.poll());
        }
        if let Some(p) = self.books.lock().take(m, size, &self.fences, false) {
            return Ok(Some(p));
        }
        if !self.rules.cannot_grow
            && let Some(p) = self.grow(m, size)?
        {
            return Ok(Some(p));
        }
        let steal = !self.rules.cannot_steal;
        if let Some(p) = self.books.lock().take(m, size, &self.fences, steal) {
            return Ok(Some(p));
        }
        // Only for memory that would do, and for no work after its free: foreign work may never end without us.
        while fenced && let Some(stamp) = self.awaited(m, size, steal) {
            self.fences.wait(stamp)?;
            if let Some(p) = self.books.lock().take(m, size, &self.fences, steal) {
                return Ok(Some(p));
            }
        }
        Ok(None)
    }

    fn awaited(&self, m: usize, size: usize, steal: bool) -> Option<u64> {
        self.books.lock().awaited(m, size, &self.fences, steal)
    }

    /// The root grows by what is needed, and `m` takes its block out of that.
    fn grow(&self, m: usize, size: usize) -> Result<Option<u64>, Error> {
        if let Some(p) = self.books.lock().grow_into_spare(m, size) {
            return Ok(Some(p));
        }
        let segment = match self.source.acquire(Arena::Large, size) {
            Ok(segment) => segment,
            Err(CuError::OUT_OF_MEMORY) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let (base, whole) = (segment.base, segment.size);
        let mut books = self.books.lock();
        match books.grow_by(m, size, base, whole) {
            Some(p) => {
                books.segments.push(segment);
                Ok(Some(p))
            }
            None => {
                drop(books);
                self.source.release(segment)?;
                Ok(None)
            }
        }
    }

    /// `InvalidArgument`, and nothing changed, for a pointer that is not a live block's start, a stream without a manager, or
    /// another named stream than the block's.
    pub fn free(&self, p: u64, s: Stream) -> Result<(), Error> {
        let mut books = self.books.lock();
        let b = books.space.lookup(p).ok_or(Error::InvalidArgument)?;
        let by = books.manager(s)?;
        let owner = books.space.owner(b);
        let of =
            books.managers.iter().position(|m| m.ready == owner || m.parked == owner).expect("every owner has one");
        if by != of && by != ROOT {
            return Err(Error::InvalidArgument);
        }
        let stamp = self.fences.stamp();
        // The per-thread stream is another one in every thread: no free on it is in the next allocation's order.
        let in_order = by == of && owner == books.managers[of].ready && s != Stream::PER_THREAD;
        let to = if in_order { books.managers[of].ready } else { books.managers[of].parked };
        books.space.free(b, to, stamp);
        Ok(())
    }

    // ---- questions ----

    /// Free and total bytes of the manager of `s`. As in CNMeM, the root's total includes what its children have.
    pub fn info(&self, s: Stream) -> Result<(usize, usize), Error> {
        let books = self.books.lock();
        let m = books.manager(s)?;
        let free = books.free(m);
        let total = if m == ROOT { books.space.total() } else { free + books.live(m) };
        Ok((free, total))
    }

    /// A description of the manager of `s`, block by block.
    pub fn describe(&self, s: Stream) -> Result<String, Error> {
        let books = self.books.lock();
        let m = books.manager(s)?;
        let Manager { ready, parked, .. } = books.managers[m];
        let (free, live) = (books.free(m), books.live(m));
        let name = if m == ROOT { "root (NULL stream)".into() } else { format!("stream {:#x}", s.0) };
        let mut out = String::new();
        let _ =
            writeln!(out, "gpupool: device {}, {name}: {} bytes, {live} used, {free} free", self.ordinal, free + live);
        let mut list = |what: &str, blocks: Vec<BlockId>| {
            let _ = writeln!(out, "  {what}: {} blocks", blocks.len());
            for b in blocks {
                let _ = writeln!(out, "    {:#016x} {:>14} bytes", books.space.addr(b), books.space.size(b));
            }
        };
        list("used", books.space.live_blocks(Some(ready)));
        list("used, from before the stream was made anew", books.space.live_blocks(Some(parked)));
        list("free", books.space.free_blocks(ready));
        list("free, waiting for earlier work", books.space.free_blocks(parked));
        Ok(out)
    }

    /// Walks the invariants.
    #[cfg(test)]
    pub fn check(&self) -> Result<(), String> {
        let books = self.books.lock();
        books.space.check()?;
        let managed: usize = (0..books.managers.len()).map(|m| books.free(m) + books.live(m)).sum();
        let spare: usize = books.spare.iter().map(|s| s.1).sum();
        let held: usize = books.segments.iter().map(|s| s.size).sum();
        if managed != books.space.total() || managed + spare != held {
            return Err(format!(
                "managers have {managed}, regions {}, spare {spare}, held {held}",
                books.space.total()
            ));
        }
        Ok(())
    }
}

impl Drop for Device {
    /// Returns every byte to the driver, live blocks or not, after the work in the context.
    fn drop(&mut self) {
        if crate::driver::driver().is_err() {
            // The process exits, or this is a forked child: the driver is not to be called, and takes all back itself.
            return;
        }
        let books = self.books.get_mut();
        match CurrentContext::enter(self.driver, self.ctx) {
            Ok(_ctx) => {
                // A context that was reset has nothing left to wait for.
                if let Err(e) = self.driver.ctx_synchronize() {
                    log::debug!("device {}: {e:?} at the end", self.ordinal);
                }
                for segment in books.segments.drain(..) {
                    if let Err(e) = self.source.release(segment) {
                        log::warn!("device {}: memory could not be given back: {e:?}", self.ordinal);
                    }
                }
                self.fences.destroy_events();
            }
            Err(e) => log::debug!("device {}: its context is gone: {e:?}", self.ordinal),
        }
        if let Err(e) = self.driver.primary_release(self.ordinal) {
            log::debug!("device {}: its context could not be released: {e:?}", self.ordinal);
        }
    }
}

/// None where it cannot be told: for the NULL stream, a per-thread one, a stream being captured, and drivers without ids.
fn stream_id(driver: &Driver, s: Stream) -> Result<Option<u64>, Error> {
    if is_null(s)
        || s == Stream::PER_THREAD
        || !driver.has_stream_id()
        || driver.stream_is_capturing(s).map_err(|_| Error::InvalidArgument)?
    {
        return Ok(None);
    }
    driver.stream_id(s).map(Some).map_err(|_| Error::InvalidArgument)
}

fn is_null(s: Stream) -> bool {
    s == Stream::NULL || s == Stream::LEGACY
}

impl Manager {
    /// `InvalidArgument` for a stream of another context than `ctx`, whose fences would not cover its work.
    fn new(space: &mut Space, driver: &Driver, ctx: Context, stream: Stream) -> Result<Manager, Error> {
        if !is_null(stream) && driver.stream_ctx(stream) != Ok(ctx) {
            return Err(Error::InvalidArgument);
        }
        let stream_id = stream_id(driver, stream)?;
        Ok(Manager { stream, stream_id, ready: space.add_owner(), parked: space.add_owner() })
    }
}

impl Books {
    fn manager(&self, s: Stream) -> Result<usize, Error> {
        if is_null(s) {
            return Ok(ROOT);
        }
        self.managers[1..].iter().position(|m| m.stream == s).map(|i| i + 1).ok_or(Error::InvalidArgument)
    }

    fn free(&self, m: usize) -> usize {
        let Manager { ready, parked, .. } = self.managers[m];
        self.space.free_bytes(ready) + self.space.free_bytes(parked)
    }

    fn live(&self, m: usize) -> usize {
        let Manager { ready, parked, .. } = self.managers[m];
        self.space.used_bytes(ready) + self.space.used_bytes(parked)
    }

    /// A stream that has another id than the manager knew is a new one under an old handle: neither what was freed on the old
    /// one nor what is live from its time is in its order.
    fn notice(&mut self, m: usize, id: Option<u64>) {
        if id.is_none() || self.managers[m].stream_id == id {
            return;
        }
        if std::mem::replace(&mut self.managers[m].stream_id, id).is_none() {
            return;
        }
        let Manager { ready, parked, .. } = self.managers[m];
        for b in self.space.free_blocks(ready).into_iter().chain(self.space.live_blocks(Some(ready))) {
            self.space.set_owner(b, parked);
        }
    }

    /// A live block of `size` for `m` out of memory that is there: its own, the root's, with `steal` the others' too.
    fn take(&mut self, m: usize, size: usize, fences: &Fences, steal: bool) -> Option<u64> {
        let ready = self.managers[m].ready;
        self.move_finished(self.managers[m].parked, ready, fences);
        if let Some(b) = self.space.alloc(ready, size) {
            return Some(self.space.addr(b));
        }
        let from_root = if m == ROOT { 0..0 } else { ROOT..ROOT + 1 };
        let from_all = 0..if steal { self.managers.len() } else { 0 };
        for other in from_root.chain(from_all).filter(|&o| o != m) {
            let Manager { ready: theirs, parked, .. } = self.managers[other];
            self.move_finished(parked, theirs, fences);
            if let Some(p) = self.take_from(theirs, ready, size, fences) {
                return Some(p);
            }
        }
        if steal { self.take_run(ready, size, fences) } else { None }
    }

    /// The best finished block of `from` moves, cut to `size`, to `to` and is live there.
    fn take_from(&mut self, from: OwnerId, to: OwnerId, size: usize, fences: &Fences) -> Option<u64> {
        if self.space.largest_free(from) < size {
            return None;
        }
        let fits = |b: &BlockId| self.space.size(*b) >= size && fences.is_finished(self.space.stamp(*b));
        let b = self.space.free_blocks(from).into_iter().filter(fits).min_by_key(|&b| self.space.size(b))?;
        let (b, _) = self.space.split(b, size);
        let stamp = self.space.stamp(b);
        Some(self.space.take(b, to, stamp))
    }

    /// A run of finished free blocks side by side, whoever owns them, is taken over whole.
    fn take_run(&mut self, to: OwnerId, size: usize, fences: &Fences) -> Option<u64> {
        let owners: Vec<OwnerId> = self.managers.iter().flat_map(|m| [m.ready, m.parked]).collect();
        for &base in &self.regions {
            let runs = self.space.free_runs(base);
            let fit = |r: &&(u64, u64, u64)| (r.1 - r.0) as usize >= size && fences.is_finished(r.2);
            let Some(&(start, end, _)) = runs.iter().find(fit) else {
                continue;
            };
            for &o in owners.iter().filter(|&&o| o != to) {
                for b in self.space.free_blocks(o) {
                    if (start..end).contains(&self.space.addr(b)) {
                        self.space.set_owner(b, to);
                    }
                }
            }
            return self.space.alloc(to, size).map(|b| self.space.addr(b));
        }
        None
    }

    /// The earliest unfinished stamp among the free memory that `m` may have; None when `size` would not be there even if all
    /// of it were finished.
    fn awaited(&self, m: usize, size: usize, fences: &Fences, steal: bool) -> Option<u64> {
        let reach = |o: &usize| steal || *o == m || *o == ROOT;
        let reach: Vec<usize> = (0..self.managers.len()).filter(reach).collect();
        let run = |base: u64| self.space.free_runs(base).iter().any(|r| (r.1 - r.0) as usize >= size);
        let enough = reach.iter().any(|&o| self.free(o) >= size) || steal && self.regions.iter().any(|&base| run(base));
        let owners = reach.iter().flat_map(|&o| [self.managers[o].ready, self.managers[o].parked]);
        let stamps = owners.flat_map(|o| self.space.free_blocks(o)).map(|b| self.space.stamp(b));
        stamps.filter(|&stamp| enough && !fences.is_finished(stamp)).min()
    }

    fn move_finished(&mut self, from: OwnerId, to: OwnerId, fences: &Fences) {
        for b in self.space.free_blocks(from) {
            if fences.is_finished(self.space.stamp(b)) {
                self.space.set_owner(b, to);
            }
        }
    }

    /// Memory that the source gave beyond what was asked: the region before it goes on.
    fn grow_into_spare(&mut self, m: usize, size: usize) -> Option<u64> {
        let i = self.spare.iter().position(|s| s.1 >= size)?;
        let (base, whole) = self.spare[i];
        let b = self.space.extend_region(base, size, self.managers[ROOT].ready, self.grain)?;
        if whole > size {
            self.spare[i] = (base + size as u64, whole - size);
        } else {
            self.spare.swap_remove(i);
        }
        Some(self.space.take(b, self.managers[m].ready, 0))
    }

    /// `m` takes exactly `size` of a new segment; the rest is spare, so that no manager counts more than was asked.
    fn grow_by(&mut self, m: usize, size: usize, base: u64, whole: usize) -> Option<u64> {
        let b = self.space.add_region(base, size, self.managers[ROOT].ready, self.grain)?;
        self.regions.push(base);
        if whole > size {
            self.spare.push((base + size as u64, whole - size));
        }
        Some(self.space.take(b, self.managers[m].ready, 0))
    }
}

#[cfg(test)]
mod tests;
