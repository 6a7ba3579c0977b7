//! Streams: queues of work, each with a worker thread of its own, and the dependencies between them.
//!
//! A stream counts what was submitted and what is complete. A dependency names a stream and a count; everything that orders
//! work (events, legacy-stream rules, context barriers) is a list of dependencies taken at submission. They only ever name
//! work submitted earlier, so that no cycle can arise.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::capture::Capture;
use crate::memory::Freed;
use crate::{call, config};

/// An idle worker thread ends after this long; the next work starts another.
const WORKER_IDLE: Duration = Duration::from_secs(2);

#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Kind {
    Legacy,
    PerThread,
    User,
}

pub struct Stream {
    /// Unique for the life of the process.
    pub id: u64,
    pub context: usize,
    pub kind: Kind,
    pub flags: u32,
    pub priority: i32,
    submitted: AtomicU64,
    completed: AtomicU64,
    /// The last context barrier that work on this stream already waits for.
    pub barrier_seen: AtomicU64,
    /// The capture that it takes part in. Changed under the state's lock only.
    pub capture: Mutex<Option<Arc<Capture>>>,
    queue: Mutex<Queue>,
    work: Condvar,
    done: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    worker: bool,
}

struct Job {
    after: Vec<Dep>,
    op: Op,
}

/// Work of `stream` up to and including number `upto`.
#[derive(Clone)]
pub struct Dep {
    pub stream: Arc<Stream>,
    pub upto: u64,
}

/// When a timed event was reached, in nanoseconds of `now`.
#[derive(Default)]
pub struct Stamp(AtomicU64);

pub type HostFn = unsafe extern "C" fn(*mut c_void);
pub type StreamCallback = unsafe extern "C" fn(usize, u32, *mut c_void);

#[derive(Clone)]
pub enum Op {
    /// Nothing but a place in the order; notes the time when it is reached.
    Marker(Option<Arc<Stamp>>),
    /// `count` elements of `width` bytes.
    Set {
        dst: u64,
        value: u32,
        width: usize,
        count: usize,
    },
    Copy {
        dst: u64,
        src: u64,
        bytes: usize,
    },
    Host {
        run: HostFn,
        data: usize,
    },
    Callback {
        run: StreamCallback,
        stream: usize,
        data: usize,
    },
    Wait {
        address: u64,
        value: u64,
        wide: bool,
        condition: u32,
    },
    Write {
        address: u64,
        value: u64,
        wide: bool,
    },
    /// A stream-ordered free.
    Free(Arc<Freed>),
}

impl Stamp {
    pub fn at(nanoseconds: u64) -> Stamp {
        Stamp(AtomicU64::new(nanoseconds))
    }

    pub fn nanoseconds(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// Nanoseconds since the first call.
pub fn now() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

impl Dep {
    pub fn is_done(&self) -> bool {
        self.stream.completed.load(Ordering::Acquire) >= self.upto
    }

    /// Blocks until done. The state's lock must not be held.
    pub fn wait(&self) {
        if self.is_done() {
            return;
        }
        let mut queue = self.stream.queue.lock();
        while !self.is_done() {
            self.stream.done.wait(&mut queue);
        }
    }
}

/// Blocks until all are done. The state's lock must not be held.
pub fn wait_all(deps: &[Dep]) {
    deps.iter().for_each(Dep::wait);
}

impl Stream {
    pub fn new(context: usize, kind: Kind, flags: u32, priority: i32) -> Arc<Stream> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        Arc::new(Stream {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            context,
            kind,
            flags,
            priority,
            submitted: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            barrier_seen: AtomicU64::new(0),
            capture: Mutex::new(None),
            queue: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
        })
    }

    /// Whether it and the legacy stream wait for each other.
    pub fn is_blocking(&self) -> bool {
        self.flags & crate::stream::NON_BLOCKING == 0
    }

    /// All that was submitted so far, unless it is complete.
    pub fn pending(self: &Arc<Stream>) -> Option<Dep> {
        let dep = Dep { stream: self.clone(), upto: self.submitted.load(Ordering::Acquire) };
        (!dep.is_done()).then_some(dep)
    }

    /// Appends work. Called under the state's lock, which keeps submissions to all streams in one order.
    pub fn push(self: &Arc<Stream>, op: Op, mut after: Vec<Dep>) -> Dep {
        after.retain(|dep| !dep.is_done());
        let mut queue = self.queue.lock();
        let number = self.submitted.fetch_add(1, Ordering::AcqRel) + 1;
        let idle = self.completed.load(Ordering::Acquire) == number - 1;
        match op {
            // A marker on an idle stream is reached at once: no thread is needed for it.
            Op::Marker(stamp) if idle && after.is_empty() => {
                reach(stamp.as_deref());
                self.completed.store(number, Ordering::Release);
            }
            op => {
                queue.jobs.push_back(Job { after, op });
                if queue.worker {
                    self.work.notify_one();
                } else {
                    queue.worker = true;
                    let stream = self.clone();
                    // Detached: it must never keep the process from ending.
                    std::thread::Builder::new()
                        .name(format!("simcuda-{}", self.id))
                        .stack_size(256 << 10)
                        .spawn(move || stream.work())
                        .expect("a worker thread for the stream");
                }
            }
        }
        Dep { stream: self.clone(), upto: number }
    }

    fn work(self: Arc<Stream>) {
        block_signals();
        sleep_precisely();
        loop {
            let mut queue = self.queue.lock();
            let job = loop {
                if let Some(job) = queue.jobs.pop_front() {
                    break job;
                }
                if self.work.wait_for(&mut queue, WORKER_IDLE).timed_out() && queue.jobs.is_empty() {
                    queue.worker = false;
                    return;
                }
            };
            drop(queue);
            wait_all(&job.after);
            if call::exiting() {
                // The host program is being torn down: touch nothing more of it. Whoever waits ends with the process.
                return;
            }
            job.op.run();
            // What the job holds (streams, freed memory) goes before anyone hears that it is complete.
            drop(job);
            let queue = self.queue.lock();
            self.completed.fetch_add(1, Ordering::AcqRel);
            self.done.notify_all();
            drop(queue);
        }
    }
}

/// The host program's signal handlers run on its own threads only.
fn block_signals() {
    // SAFETY: `set` is filled before it is used; the faults that must still be delivered are removed from it.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut set);
        for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGABRT] {
            libc::sigdelset(&mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
    }
}

/// Delays are a few microseconds; the kernel would stretch each of them by 50.
fn sleep_precisely() {
    // SAFETY: concerns the calling thread's timers only.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
}

fn reach(stamp: Option<&Stamp>) {
    if let Some(stamp) = stamp {
        stamp.0.store(now().max(1), Ordering::Release);
    }
}

impl Op {
    fn run(&self) {
        match *self {
            Op::Marker(ref stamp) => reach(stamp.as_deref()),
            Op::Set { dst, value, width, count } => {
                dawdle();
                // SAFETY: the submitter vouches for the range; a range that is not mapped faults, as intended.
                unsafe { set(dst, value, width, count) }
            }
            Op::Copy { dst, src, bytes } => {
                dawdle();
                // SAFETY: as above; `copy` allows overlap.
                unsafe { std::ptr::copy(src as *const u8, dst as *mut u8, bytes) }
            }
            // SAFETY: the submitter vouches for its function and data.
            Op::Host { run, data } => call::in_host_function(|| unsafe { run(data as *mut c_void) }),
            Op::Callback { run, stream, data } => {
                // SAFETY: as above.
                call::in_host_function(|| unsafe { run(stream, crate::codes::SUCCESS, data as *mut c_void) })
            }
            Op::Wait { address, value, wide, condition } => {
                // SAFETY: the submitter vouches that the word stays mapped until the wait is over.
                while !call::exiting() && !holds(unsafe { load(address, wide) }, value, wide, condition) {
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
            // SAFETY: as above; the address is aligned, checked at submission.
            Op::Write { address, value, wide } => unsafe {
                if wide {
                    AtomicU64::from_ptr(address as *mut u64).store(value, Ordering::Release);
                } else {
                    AtomicU32::from_ptr(address as *mut u32).store(value as u32, Ordering::Release);
                }
            },
            Op::Free(ref freed) => freed.release(),
        }
    }
}

/// Sets `count` elements of `width` (1, 2 or 4) bytes.
///
/// # Safety
/// The range must be writable.
unsafe fn set(dst: u64, value: u32, width: usize, count: usize) {
    let bytes = value.to_ne_bytes();
    if bytes[..width].iter().all(|&b| b == bytes[0]) {
        // SAFETY: passed on to the caller.
        return unsafe { std::ptr::write_bytes(dst as *mut u8, bytes[0], width * count) };
    }
    for i in 0..count {
        // SAFETY: passed on to the caller; alignment is not assumed.
        unsafe {
            match width {
                2 => (dst as *mut u16).add(i).write_unaligned(value as u16),
                _ => (dst as *mut u32).add(i).write_unaligned(value),
            }
        }
    }
}

/// # Safety
/// The word must be readable, and aligned.
unsafe fn load(address: u64, wide: bool) -> u64 {
    // SAFETY: passed on to the caller.
    unsafe {
        if wide {
            AtomicU64::from_ptr(address as *mut u64).load(Ordering::Acquire)
        } else {
            AtomicU32::from_ptr(address as *mut u32).load(Ordering::Acquire) as u64
        }
    }
}

/// `CUstreamWaitValue_flags`: 0 cyclic greater or equal, 1 equal, 2 and, 3 nor.
fn holds(word: u64, value: u64, wide: bool, condition: u32) -> bool {
    let mask = if wide { u64::MAX } else { u32::MAX as u64 };
    match condition & 3 {
        0 if wide => word.wrapping_sub(value) as i64 >= 0,
        0 => (word as u32).wrapping_sub(value as u32) as i32 >= 0,
        1 => word == value,
        2 => word & value != 0,
        _ => !(word | value) & mask != 0,
    }
}

static DELAY_US: AtomicU32 = AtomicU32::new(0);

/// Longest random sleep before a memset or copy, in microseconds.
pub fn set_delay(microseconds: u32) {
    DELAY_US.store(microseconds, Ordering::Relaxed);
}

pub fn read_environment() {
    set_delay(config::number("SIMCUDA_DELAY_US", 0).max(0) as u32);
}

fn dawdle() {
    static SEED: AtomicU64 = AtomicU64::new(0x9e37_79b9_7f4a_7c15);
    let most = DELAY_US.load(Ordering::Relaxed) as u64;
    if most > 0 {
        let mut x = SEED.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        std::thread::sleep(Duration::from_micros((x ^ (x >> 31)) % (most + 1)));
    }
}
