//! The pool's contract, on simcuda: order between streams, accounting, and random operations with late work.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::testing::{self, Rng, Sim};

fn config() -> Config {
    Config { bin_growth: 2, bin_steps: 8, bin_min: 512, bin_max: MIB, max_cached: None, ..Config::default() }
}

/// A pool of its own over device `ordinal`'s primary context, which is current afterwards.
fn pool(sim: &Sim, ordinal: i32) -> Arc<Pool> {
    let ctx = sim.context(ordinal);
    let d = sim.driver;
    let source = Arc::new(crate::source::vmm(d, ordinal).expect("simcuda has VMM"));
    Arc::new(Pool::new(d, ctx, d.ctx_id(ctx).unwrap(), (ordinal, true), source, &config()).unwrap())
}

/// Everything goes back: what the test left is a leak.
fn empty(pool: &Pool) {
    pool.check().unwrap();
    assert_eq!(pool.stats().live, 0, "blocks are still live");
    pool.wait_for_pending();
    pool.trim(0).unwrap();
    pool.wait_for_pending();
    pool.trim(0).unwrap();
    pool.check().unwrap();
    assert_eq!(pool.stats().held, 0, "idle memory could not be given back");
}

#[test]
fn a_stream_gets_its_own_memory_back_at_once() {
    let sim = testing::sim();
    let pool = pool(&sim, 0);
    let s = sim.stream();
    for size in [1, 512, 100_000, MIB, MIB + 1, 40 * MIB] {
        let p = pool.malloc(size, s).unwrap();
        assert_eq!(p % 512, 0);
        pool.free(p, s).unwrap();
        assert_eq!(pool.malloc(size, s).unwrap(), p, "size {size}");
        pool.free(p, s).unwrap();
        pool.check().unwrap();
    }
    assert_eq!(pool.stats().fences, 0, "one stream needs no fence");
    empty(&pool);
}

#[test]
fn a_larger_request_takes_only_what_free_memory_lacks() {
    let sim = testing::sim();
    let pool = pool(&sim, 0);
    let s = sim.stream();
    let first = pool.malloc(96 * MIB, s).unwrap();
    // A page behind it, which is live: there is no room to grow there, so the free memory goes to where there is.
    let wall = pool.malloc(8 * MIB, s).unwrap();
    pool.free(first, s).unwrap();
    let held = pool.stats().held as usize;
    let second = pool.malloc(120 * MIB, s).unwrap();
    assert_ne!(second, first);
    assert!(pool.stats().held as usize <= held + 32 * MIB, "{} bytes held", pool.stats().held);
    pool.check().unwrap();
    // With nothing behind it, it grows in place.
    pool.free(second, s).unwrap();
    assert_eq!(pool.malloc(124 * MIB, s).unwrap(), second);
    assert!(pool.stats().held as usize <= held + 32 * MIB, "{} bytes held", pool.stats().held);
    pool.free(second, s).unwrap();
    pool.free(wall, s).unwrap();
    pool.check().unwrap();
    empty(&pool);
}

/// Gives pages back slowly, as a thread does that the scheduler has forgotten.
struct Slow(Arc<dyn Source>);

impl Source for Slow {
    fn acquire(&self, arena: Arena, size: usize) -> crate::driver::CuResult<crate::source::Segment> {
        self.0.acquire(arena, size)
    }
    fn page_max(&self) -> usize {
        self.0.page_max()
    }
    fn release(&self, segment: crate::source::Segment) -> crate::driver::CuResult<()> {
        std::thread::sleep(std::time::Duration::from_millis(2));
        self.0.release(segment)
    }
    fn kind(&self) -> SourceKind {
        self.0.kind()
    }
}

#[test]
fn memory_on_its_way_back_is_waited_for() {
    let sim = testing::sim();
    let ctx = sim.context(0);
    let d = sim.driver;
    let source = Arc::new(Slow(Arc::new(crate::source::vmm(d, 0).expect("simcuda has VMM"))));
    let pool = Pool::new(d, ctx, d.ctx_id(ctx).unwrap(), (0, true), source, &config()).unwrap();
    let s = sim.stream();
    let (free, _) = d.mem_info().unwrap();
    let blocks: Vec<_> = (0..8).map(|_| pool.malloc(free / 9, s).unwrap()).collect();
    blocks.into_iter().for_each(|p| pool.free(p, s).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            d.ctx_set_current(Some(ctx)).unwrap();
            pool.trim(0).unwrap();
        });
        while pool.stats().held > 0 {
            std::thread::yield_now();
        }
        // The books are empty, the device is full.
        pool.trim(0).unwrap();
        assert_eq!(d.mem_info().unwrap().0, free, "a trim returned before the pages were gone");
        let blocks: Vec<_> = (0..8).map(|_| pool.malloc(free / 9, s).unwrap()).collect();
        blocks.into_iter().for_each(|p| pool.free(p, s).unwrap());
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            d.ctx_set_current(Some(ctx)).unwrap();
            pool.trim(0).unwrap();
        });
        while pool.stats().held > 0 {
            std::thread::yield_now();
        }
        let p = pool.malloc(free / 2, s).unwrap();
        pool.free(p, s).unwrap();
    });
    empty(&pool);
}

#[test]
fn wrong_pointers_change_nothing() {
    let sim = testing::sim();
    let pool = pool(&sim, 0);
    let p = pool.malloc(4096, Stream::NULL).unwrap();
    let before = pool.stats();
    for wrong in [0, p + 512, p + 4096, 0xdead_beef_0000, u64::MAX] {
        assert!(matches!(pool.free(wrong, Stream::NULL), Err(Error::UnknownPointer)), "{wrong:#x}");
    }
    assert_eq!(pool.stats().live, before.live);
    assert!(matches!(pool.malloc(0, Stream::NULL), Err(Error::InvalidArgument)));
    assert!(matches!(pool.malloc(usize::MAX, Stream::NULL), Err(Error::OutOfMemory { .. })));
    assert!(matches!(pool.malloc(4 << 40, Stream::NULL), Err(Error::OutOfMemory { .. })));
    pool.free(p, Stream::NULL).unwrap();
    assert!(matches!(pool.free(p, Stream::NULL), Err(Error::UnknownPointer)), "freed twice");
    empty(&pool);
}

#[test]
fn another_stream_waits_for_the_work_before_the_free() {
    let sim = testing::sim();
    let pool = pool(&sim, 0);
    let (a, b) = (sim.stream(), sim.stream());
    for size in [4096, 8 * MIB] {
        let gate = sim.gate(a);
        let p = pool.malloc(size, a).unwrap();
        sim.memset(p, 1, 64, a);
        pool.free(p, a).unwrap();
        let q = pool.malloc(size, b).unwrap();
        assert_ne!(p, q, "handed out while the work on it was pending");
        gate.open();
        sim.driver.ctx_synchronize().unwrap();
        // Finished now: B may have it, before any new memory is taken.
        let held = pool.stats().held;
        let r = pool.malloc(size, b).unwrap();
        assert!(r == p || pool.stats().held == held);
        pool.free(q, b).unwrap();
        pool.free(r, b).unwrap();
        pool.check().unwrap();
    }
    empty(&pool);
}

#[test]
fn recorded_streams_hold_a_block_back() {
    let sim = testing::sim();
    let pool = pool(&sim, 0);
    let (a, b) = (sim.stream(), sim.stream());
    let p = pool.malloc(2 * MIB, a).unwrap();
    pool.record_stream(p, b).unwrap();
    let gate = sim.gate(b);
    sim.memset(p, 2, 64, b);
    pool.free(p, a).unwrap();
    let q = pool.malloc(2 * MIB, a).unwrap();
    assert_ne!(p, q, "the other stream still uses it");
    gate.open();
    sim.driver.ctx_synchronize().unwrap();
    pool.free(q, a).unwrap();
    let x = pool.malloc(2 * MIB, a).unwrap();
    let y = pool.malloc(2 * MIB, a).unwrap();
    assert!(x == p || y == p, "a finished block came back");
    pool.free(x, a).unwrap();
    pool.free(y, a).unwrap();
    empty(&pool);
}

#[test]
fn a_new_stream_under_an_old_handle_is_another_stream() {
    let sim = testing::sim();
    let pool = pool(&sim, 0);
    let old = sim.stream();
    let gate = sim.gate(old);
    let p = pool.malloc(4096, old).unwrap();
    sim.memset(p, 3, 64, old);
    pool.free(p, old).unwrap();
    sim.destroy(old);
    let new = sim.stream();
    assert_eq!(old, new, "the stand-in gives the handle back, as the real driver does");
    assert_ne!(pool.malloc(4096, new).unwrap(), p, "the old stream's work is not done");
    gate.open();
    sim.driver.ctx_synchronize().unwrap();
    let live: Vec<u64> = {
        let space = &pool.inner.lock().space;
        space.live_blocks(None).into_iter().map(|b| space.addr(b)).collect()
    };
    live.into_iter().for_each(|p| pool.free(p, new).unwrap());
    empty(&pool);
}

#[test]
fn a_refused_page_leaves_nothing_behind() {
    let sim = testing::sim();
    let pool = pool(&sim, 0);
    for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess"] {
        for nth in 1..=3 {
            sim.fail(&format!("{call}:{nth}"));
            let first = pool.malloc(80 * MIB, Stream::NULL);
            sim.fail("");
            // One refused page is answered with a retry, so the request may succeed; the next one must.
            pool.check().unwrap();
            let next = pool.malloc(80 * MIB, Stream::NULL).unwrap();
            for p in first.into_iter().chain([next]) {
                pool.free(p, Stream::NULL).unwrap();
            }
            empty(&pool);
        }
    }
    sim.fail("cuMemCreate:every:1");
    assert!(matches!(pool.malloc(MIB, Stream::NULL), Err(Error::OutOfMemory { .. })));
    sim.fail("");
    let p = pool.malloc(MIB, Stream::NULL).unwrap();
    pool.free(p, Stream::NULL).unwrap();
    empty(&pool);
}

#[test]
fn idle_memory_is_given_back_before_an_allocation_fails() {
    let sim = testing::sim();
    let pool = pool(&sim, 0);
    let total = sim.driver.device_total(0).unwrap();
    let part = total / 8 / MIB * MIB;
    let (a, b) = (sim.stream(), sim.stream());
    // All of the device in eighths, freed on one stream; then one block of three quarters on another.
    let blocks: Vec<_> = std::iter::from_fn(|| pool.malloc(part, a).ok()).take(7).collect();
    assert_eq!(blocks.len(), 7);
    for p in blocks {
        pool.free(p, a).unwrap();
    }
    let p = pool.malloc(6 * part, b).expect("idle segments are given back");
    let e = pool.malloc(6 * part, b).unwrap_err();
    assert!(matches!(e, Error::OutOfMemory { detail: Some(_), .. }), "{e:?}");
    pool.free(p, b).unwrap();
    pool.trim(0).unwrap();
    empty(&pool);
}

#[test]
fn a_free_without_a_stream_is_a_barrier_on_the_device_and_not_on_the_host() {
    let sim = testing::sim();
    let pool = pool(&sim, 0);
    let (a, b) = (sim.stream(), sim.stream());
    let seen = sim.pinned(64);
    let p = pool.malloc_everyone(40 * MIB).unwrap();
    let gate = sim.gate(a);
    sim.memset(p, 1, 64, a);
    pool.free_everyone(p).unwrap();
    // It comes back at once, while A's work on it is held up; B's work on it comes after A's.
    let q = pool.malloc_everyone(40 * MIB).unwrap();
    assert_eq!((p, pool.stats().waits), (q, 0));
    sim.memset(q, 2, 64, b);
    sim.copy_to_host(seen, q, 64, b);
    gate.open();
    sim.driver.ctx_synchronize().unwrap();
    // SAFETY: 64 bytes that nothing writes any more.
    assert_eq!(unsafe { std::slice::from_raw_parts(seen, 64) }, [2; 64]);
    pool.free_everyone(q).unwrap();
    empty(&pool);
}

#[test]
fn a_barrier_holds_back_nothing_that_the_free_did_not_see() {
    let sim = testing::sim();
    let pool = pool(&sim, 0);
    let (a, b) = (sim.stream(), sim.stream());
    let p = pool.malloc_everyone(40 * MIB).unwrap();
    pool.free_everyone(p).unwrap();
    // A waits for what B is given later: the real cudaFree, which came before, would not have waited for A.
    let gate = sim.gate(a);
    let q = pool.malloc_everyone(40 * MIB).unwrap();
    assert_eq!(p, q);
    let seen = sim.pinned(1);
    sim.memset(q, 3, 1, b);
    sim.copy_to_host(seen, q, 1, b);
    sim.wait_for(b);
    // SAFETY: one byte that nothing writes any more.
    assert_eq!(unsafe { *seen }, 3);
    gate.open();
    pool.free_everyone(q).unwrap();
    empty(&pool);
}

#[test]
fn memory_that_leaves_the_streams_is_finished_first() {
    let sim = testing::sim();
    let pool = pool(&sim, 0);
    pool.finished_only("a test asks for it");
    let a = sim.stream();
    let p = pool.malloc_everyone(40 * MIB).unwrap();
    let gate = sim.gate(a);
    sim.memset(p, 1, 64, a);
    pool.free_everyone(p).unwrap();
    let q = pool.malloc_everyone(40 * MIB).unwrap();
    assert_ne!(p, q, "ordered is not enough");
    gate.open();
    sim.driver.ctx_synchronize().unwrap();
    let r = pool.malloc_everyone(40 * MIB).unwrap();
    assert_eq!(p, r, "finished");
    [q, r].into_iter().for_each(|p| pool.free_everyone(p).unwrap());
    empty(&pool);
}

#[test]
fn frees_during_a_capture_wait_for_its_end() {
    let sim = testing::sim();
    let pool = pool(&sim, 0);
    let p = pool.malloc_everyone(40 * MIB).unwrap();
    let events = pool.stats().fences;
    fence::capture_begins(Stream(1 << 20));
    pool.free_everyone(p).unwrap();
    let q = pool.malloc_everyone(40 * MIB).unwrap();
    assert_ne!(p, q);
    assert_eq!(pool.stats().fences, events, "an event would break the capture");
    fence::capture_ends(Stream(1 << 20));
    let r = pool.malloc_everyone(40 * MIB).unwrap();
    assert_eq!(p, r);
    [q, r].into_iter().for_each(|p| pool.free_everyone(p).unwrap());
    empty(&pool);
}

/// What is freed inside a capture stays with the graph, and is not looked for elsewhere: a fence would break another capture.
#[test]
fn memory_of_a_capture_is_nobodys() {
    let sim = testing::sim();
    let pool = pool(&sim, 0);
    let (a, b) = (sim.stream(), sim.stream());
    sim.begin_capture(a);
    let p = pool.malloc(40 * MIB, a).unwrap();
    pool.free(p, a).unwrap();
    assert_eq!(pool.malloc(40 * MIB, a).unwrap(), p, "the capture's own order");
    pool.free(p, a).unwrap();
    let q = pool.malloc(40 * MIB, b).unwrap();
    assert_ne!(p, q);
    sim.end_capture(a);
    assert_eq!(pool.stats().fences, 0);
    pool.free(q, b).unwrap();
    pool.check().unwrap();
}

#[test]
fn idle_memory_decays() {
    let sim = testing::sim();
    let pool = pool(&sim, 0);
    let p = pool.malloc_everyone(400 * MIB).unwrap();
    let small = pool.malloc_everyone(10 * MIB).unwrap();
    pool.free_everyone(p).unwrap();
    let held = pool.stats().held;
    assert!(pool.decay().unwrap(), "there will be more to give back");
    assert_eq!(pool.stats().held, held, "it was in use a moment ago");
    pool.decay().unwrap();
    pool.decay().unwrap();
    assert!(pool.stats().held < 100 * MIB as u64, "{:?}", pool.stats());
    pool.check().unwrap();
    pool.free_everyone(small).unwrap();
    empty(&pool);
}

/// Random operations by several threads on streams and devices, work late on purpose, faults on some runs of calls.
/// Every block gets a value written on its stream when it is had, and is read on its stream before it is freed: a block
/// that somebody else may still write shows another value.
#[test]
fn random_operations_never_show_a_foreign_write() {
    let sim = testing::sim();
    let total: u64 = std::env::var("GPUPOOL_STRESS_OPS").ok().and_then(|v| v.parse().ok()).unwrap_or(1_000_000);
    let pools: Vec<_> = (0..2).map(|d| pool(&sim, d)).collect();
    let streams: Vec<Vec<Stream>> = (0..2)
        .map(|d| {
            sim.context(d);
            (0..4).map(|_| sim.stream()).chain([Stream::LEGACY]).collect()
        })
        .collect();
    let done = AtomicU64::new(0);
    sim.delay_us(30);
    sim.fail("cuMemCreate:every:13,cuMemMap:every:17,cuMemSetAccess:every:19,cuCtxRecordEvent:every:23,cuEventCreate:every:29");
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (sim, pools, streams, done) = (&sim, &pools, &streams, &done);
            scope.spawn(move || {
                let mut rng = Rng::new(thread + 1);
                let mut live: Vec<(u64, usize, usize, Stream, u8)> = Vec::new();
                // Two bytes a read, the first and the last of a block.
                sim.context(0);
                let seen = sim.pinned(2 * 128);
                let mut reads: Vec<(u8, Stream)> = Vec::new();
                for op in 0..total / 4 {
                    let device = (op / 512 % 2) as usize;
                    if op % 512 == 0 {
                        sim.context(device as i32);
                        // Blocks and reads of the device that was current until now are finished first.
                        assert!(live.is_empty());
                    }
                    let drain = op % 512 >= 448;
                    if !drain && (live.len() < 8 || rng.below(2) == 0) {
                        let magnitude = 8 + rng.below(15);
                        let size = 1 + rng.below(1 << magnitude) as usize;
                        let s = streams[device][rng.below(5) as usize];
                        // Faults make some requests fail; that is an answer too.
                        if let Ok(p) = pools[device].malloc(size, s) {
                            let value = 1 + rng.below(255) as u8;
                            sim.memset(p, value, 1, s);
                            sim.memset(p + size as u64 - 1, value, 1, s);
                            live.push((p, size, device, s, value));
                        }
                    } else if !live.is_empty() {
                        let (p, size, device, s, value) = live.swap_remove(rng.below(live.len() as u64) as usize);
                        let slot = seen.wrapping_add(2 * reads.len());
                        sim.copy_to_host(slot, p, 1, s);
                        sim.copy_to_host(slot.wrapping_add(1), p + size as u64 - 1, 1, s);
                        pools[device].free(p, s).unwrap();
                        reads.push((value, s));
                    }
                    if reads.len() > 64 || (op % 512 == 511 && !reads.is_empty()) {
                        sim.driver.ctx_synchronize().unwrap();
                        for (i, (value, s)) in reads.drain(..).enumerate() {
                            // SAFETY: 256 bytes that nothing writes any more: the context is idle.
                            let seen = unsafe { [*seen.add(2 * i), *seen.add(2 * i + 1)] };
                            assert_eq!(seen, [value; 2], "a foreign write on stream {s:?} at operation {op}");
                        }
                    }
                    if op % 512 == 511 {
                        for (p, _, device, s, _) in live.drain(..) {
                            pools[device].free(p, s).unwrap();
                        }
                    }
                    if op % 4096 == 100 * thread {
                        pools[device].check().unwrap();
                        let _ = pools[device].trim(rng.below(256) as usize * MIB);
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
                for (p, _, device, s, _) in live.drain(..) {
                    pools[device].free(p, s).unwrap();
                }
            });
        }
    });
    sim.fail("");
    sim.delay_us(0);
    assert_eq!(done.into_inner(), total / 4 * 4);
    for (d, pool) in pools.iter().enumerate() {
        sim.context(d as i32);
        assert!(pool.stats().fences > 0, "streams never met");
        empty(pool);
    }
}
