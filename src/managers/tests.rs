//! CNMeM's rules, on simcuda.

use super::*;
use crate::testing::{self, Rng, Sim};

const MIB: usize = 1 << 20;

fn device(sim: &Sim, ordinal: i32, size: usize, streams: &[(Stream, usize)], rules: Rules) -> Result<Device, Error> {
    Device::new(sim.driver, &Request { ordinal, size, streams: streams.to_vec() }, rules)
}

fn free_bytes(sim: &Sim, ordinal: i32) -> usize {
    sim.context(ordinal);
    sim.driver.mem_info().unwrap().0
}

#[test]
fn accounting_is_exact_to_512_bytes() {
    let sim = testing::sim();
    let before = free_bytes(&sim, 0);
    let d = device(&sim, 0, 4096, &[], Rules::default()).unwrap();
    assert_eq!(d.info(Stream::NULL), Ok((4096, 4096)));
    let p = d.malloc(1024, Stream::NULL).unwrap();
    assert_eq!(d.info(Stream::NULL), Ok((3072, 4096)));
    let q = d.malloc(3072, Stream::NULL).unwrap();
    assert_eq!((q, d.info(Stream::NULL)), (p + 1024, Ok((0, 4096))));
    d.free(p, Stream::NULL).unwrap();
    d.free(q, Stream::NULL).unwrap();
    assert_eq!(d.malloc(4096, Stream::LEGACY), Ok(p), "coalesced, and the legacy handle is the NULL stream");
    d.check().unwrap();
    drop(d);
    assert_eq!(free_bytes(&sim, 0), before, "live blocks go back too");

    let (a, b) = (sim.stream(), sim.stream());
    let d = device(&sim, 0, 4096, &[(a, 2048), (b, 1537)], Rules::default()).unwrap();
    assert_eq!(d.info(Stream::NULL), Ok((0, 4096)), "all of it was set aside");
    assert_eq!((d.info(a), d.info(b)), (Ok((2048, 2048)), Ok((2048, 2048))));
    d.check().unwrap();
}

#[test]
fn wrong_calls_change_nothing() {
    let sim = testing::sim();
    sim.context(0);
    let (a, b, stranger) = (sim.stream(), sim.stream(), sim.stream());
    let d = device(&sim, 0, 8192, &[(a, 2048), (b, 2048)], Rules { cannot_grow: true, ..Rules::default() }).unwrap();
    let p = d.malloc(1024, a).unwrap();
    let state = || (d.info(Stream::NULL), d.info(a), d.info(b));
    let before = state();
    let no = Err(Error::InvalidArgument);
    assert_eq!(d.malloc(512, stranger), Err(Error::InvalidArgument));
    assert_eq!(d.info(stranger), Err(Error::InvalidArgument));
    for (p, s) in [(p, b), (p, stranger), (p + 512, a), (0x1234_0000, a), (0x1234_0000, Stream::NULL)] {
        assert_eq!(d.free(p, s), no);
    }
    for size in [usize::MAX, usize::MAX - 511, 1 << 40] {
        assert!(matches!(d.malloc(size, a), Err(Error::OutOfMemory { .. })));
    }
    assert_eq!(state(), before);
    d.free(p, a).unwrap();
    assert_eq!(d.free(p, a), no, "freed twice");
    d.check().unwrap();
}

#[test]
fn sizes_that_cannot_be_had_hold_nothing() {
    let sim = testing::sim();
    let before = free_bytes(&sim, 0);
    let total = sim.driver.device_total(0).unwrap();
    assert!(matches!(device(&sim, 0, total, &[], Rules::default()), Err(Error::InvalidArgument)));
    let d = device(&sim, 0, total / 100 * 95, &[], Rules::default()).expect("95 % of an idle device");
    assert!(matches!(device(&sim, 0, total / 2, &[], Rules::default()), Err(Error::OutOfMemory { .. })));
    drop(d);
    let s = sim.stream();
    let tight = Rules { cannot_grow: true, ..Rules::default() };
    assert!(matches!(device(&sim, 0, 4096, &[(s, 8192)], tight), Err(Error::OutOfMemory { .. })));
    for call in ["cuMemCreate:2", "cuMemMap:2", "cuMemSetAccess:1"] {
        sim.fail(call);
        assert!(matches!(device(&sim, 0, 100 * MIB, &[], Rules::default()), Err(Error::OutOfMemory { .. })), "{call}");
        sim.fail("");
    }
    assert_eq!(free_bytes(&sim, 0), before);
}

#[test]
fn memory_moves_between_managers_by_the_rules() {
    let sim = testing::sim();
    sim.context(0);
    let (a, b) = (sim.stream(), sim.stream());
    // A child takes from the root, then grows through it.
    let d = device(&sim, 0, 4096, &[(a, 0)], Rules::default()).unwrap();
    let p = d.malloc(1024, a).unwrap();
    assert_eq!((d.info(Stream::NULL), d.info(a)), (Ok((3072, 4096)), Ok((0, 1024))));
    let q = d.malloc(8192, a).unwrap();
    assert_eq!(d.info(a), Ok((0, 9216)));
    d.check().unwrap();
    d.free(p, a).unwrap();
    d.free(q, a).unwrap();
    // Bounded, nothing to take: out of memory.
    let fixed = Rules { cannot_grow: true, cannot_steal: true, managed: false };
    let d = device(&sim, 0, 4096, &[(a, 2048), (b, 2048)], fixed).unwrap();
    assert!(matches!(d.malloc(2560, a), Err(Error::OutOfMemory { .. })));
    // Bounded, but idle memory of others is taken over.
    let bounded = Rules { cannot_grow: true, ..Rules::default() };
    let d = device(&sim, 0, 4096, &[(a, 2048), (b, 2048)], bounded).unwrap();
    let p = d.malloc(2048, a).unwrap();
    let q = d.malloc(1024, a).unwrap();
    assert_eq!((d.info(a), d.info(b)), (Ok((0, 3072)), Ok((1024, 1024))));
    d.free(p, a).unwrap();
    d.free(q, a).unwrap();
    let all = d.malloc(4096, b).expect("side by side, of three owners");
    assert_eq!(d.info(b), Ok((0, 4096)));
    d.free(all, b).unwrap();
    assert!(d.malloc(512, Stream::NULL).is_ok(), "the root takes idle memory too");
    d.check().unwrap();
}

#[test]
fn memory_changes_streams_only_after_the_work() {
    let sim = testing::sim();
    sim.context(0);
    let (a, b) = (sim.stream(), sim.stream());
    let bounded = Rules { cannot_grow: true, ..Rules::default() };
    let d = device(&sim, 0, 4 * MIB, &[(a, 2 * MIB), (b, 2 * MIB)], bounded).unwrap();
    let p = d.malloc(2 * MIB, a).unwrap();
    sim.delay_us(20_000);
    for round in 0..20u8 {
        sim.memset(p, 1, 64, a);
        d.free(p, a).unwrap();
        // All of both: it must take what `a` gave up, after the late write.
        let q = d.malloc(4 * MIB, b).unwrap();
        sim.memset(p, 100 + round, 64, b);
        let mut seen = [0u8; 1];
        sim.driver.ctx_synchronize().unwrap();
        sim.copy_to_host(&mut seen[0], p, 1, b);
        sim.driver.ctx_synchronize().unwrap();
        assert_eq!(seen[0], 100 + round, "the late write on the first stream came after the second had the memory");
        d.free(q, b).unwrap();
        assert_eq!(d.malloc(2 * MIB, a).map(|x| x == p || x == p + 2 * MIB as u64), Ok(true));
        let owned = d.books.lock().space.live_blocks(None)[0];
        let at = d.books.lock().space.addr(owned);
        d.free(at, a).unwrap();
        let back = d.malloc(4 * MIB, a).unwrap();
        d.free(back, a).unwrap();
        assert_eq!(d.malloc(2 * MIB, a), Ok(p));
    }
    sim.delay_us(0);
}

#[test]
fn a_free_on_the_null_stream_is_safe_for_every_stream() {
    let sim = testing::sim();
    sim.context(0);
    let (a, b) = (sim.stream(), sim.stream());
    let d = device(&sim, 0, 4 * MIB, &[(a, MIB), (b, MIB)], Rules::default()).unwrap();
    let p = d.malloc(MIB, a).unwrap();
    let gate = sim.gate(b);
    sim.memset(p, 1, 64, b);
    d.free(p, Stream::NULL).unwrap();
    assert_eq!(d.info(a), Ok((MIB, MIB)), "free in the books at once");
    assert_ne!(d.malloc(MIB, a), Ok(p), "but in use on another stream still");
    gate.open();
    sim.driver.ctx_synchronize().unwrap();
    d.check().unwrap();
}

/// The random operations of the issue: threads, streams, devices, late work, faults; every block shows its own value.
#[test]
fn random_operations_end_with_nothing_held() {
    let sim = testing::sim();
    let ops: u64 = std::env::var("GPUPOOL_STRESS_OPS").ok().and_then(|v| v.parse().ok()).unwrap_or(1_000_000);
    let before = [free_bytes(&sim, 0), free_bytes(&sim, 1)];
    let streams: Vec<Vec<Stream>> = (0..2)
        .map(|o| {
            sim.context(o);
            (0..4).map(|_| sim.stream()).collect()
        })
        .collect();
    let devices: Vec<Device> = (0..2)
        .map(|o| {
            let named: Vec<_> = streams[o as usize].iter().map(|&s| (s, MIB)).collect();
            device(&sim, o, 64 * MIB, &named, Rules { cannot_grow: o == 1, ..Rules::default() }).unwrap()
        })
        .collect();
    sim.delay_us(20);
    sim.fail("cuMemCreate:every:7,cuMemMap:every:11,cuMemSetAccess:every:13,cuCtxRecordEvent:every:17");
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (sim, devices, streams) = (&sim, &devices, &streams);
            scope.spawn(move || {
                let mut rng = Rng::new(thread + 77);
                // Two bytes a read, the first and the last of a block.
                sim.context(0);
                let seen = sim.pinned(2 * 256);
                for round in 0..ops / 4 / 256 {
                    let device = (round % 2) as usize;
                    let d = &devices[device];
                    sim.context(device as i32);
                    let mut live: Vec<(u64, usize, Stream, u8)> = Vec::new();
                    let mut reads: Vec<u8> = Vec::new();
                    for _ in 0..256 {
                        if live.len() < 16 && rng.below(3) > 0 {
                            let magnitude = 9 + rng.below(12);
                            let size = 1 + rng.below(1 << magnitude) as usize;
                            let s = *streams[device].get(rng.below(5) as usize).unwrap_or(&Stream::NULL);
                            if let Ok(p) = d.malloc(size, s) {
                                let value = 1 + rng.below(255) as u8;
                                sim.memset(p, value, 1, s);
                                sim.memset(p + size as u64 - 1, value, 1, s);
                                live.push((p, size, s, value));
                            }
                        } else if !live.is_empty() {
                            let (p, size, s, value) = live.swap_remove(rng.below(live.len() as u64) as usize);
                            let slot = seen.wrapping_add(2 * reads.len());
                            sim.copy_to_host(slot, p, 1, s);
                            sim.copy_to_host(slot.wrapping_add(1), p + size as u64 - 1, 1, s);
                            let by = if rng.below(8) == 0 { Stream::NULL } else { s };
                            d.free(p, by).unwrap();
                            reads.push(value);
                        }
                    }
                    for (p, _, s, _) in live {
                        d.free(p, s).unwrap();
                    }
                    sim.driver.ctx_synchronize().unwrap();
                    for (i, value) in reads.into_iter().enumerate() {
                        // SAFETY: 512 bytes that nothing writes any more: the context is idle.
                        let seen = unsafe { [*seen.add(2 * i), *seen.add(2 * i + 1)] };
                        assert_eq!(seen, [value; 2], "a foreign write");
                    }
                    d.check().unwrap();
                }
            });
        }
    });
    sim.fail("");
    sim.delay_us(0);
    drop(devices);
    assert_eq!([free_bytes(&sim, 0), free_bytes(&sim, 1)], before);
}

#[test]
fn a_refused_stream_leaves_nothing_held() {
    let sim = testing::sim();
    let before = free_bytes(&sim, 0);
    let dead = sim.stream();
    sim.destroy(dead);
    assert!(matches!(device(&sim, 0, 64 * MIB, &[(dead, 0)], Rules::default()), Err(Error::InvalidArgument)));
    assert_eq!(free_bytes(&sim, 0), before);
}

#[test]
fn a_per_thread_stream_orders_nothing_between_threads() {
    let sim = testing::sim();
    sim.context(0);
    let own = Stream::PER_THREAD;
    let bounded = Rules { cannot_grow: true, ..Rules::default() };
    let d = device(&sim, 0, 4 * MIB, &[(own, 2 * MIB)], bounded).unwrap();
    let turn = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            sim.context(0);
            let p = d.malloc(MIB, own).unwrap();
            let gate = sim.gate(own);
            sim.memset(p, 1, MIB, own);
            turn.wait();
            turn.wait();
            d.free(p, own).unwrap();
            turn.wait();
            turn.wait();
            gate.open();
            p
        });
        turn.wait();
        d.malloc(512, own).unwrap();
        turn.wait();
        turn.wait();
        let q = d.malloc(MIB, own).unwrap();
        turn.wait();
        assert_ne!(other.join().unwrap(), q, "the other thread's stream had not got there");
    });
    d.check().unwrap();
}

#[test]
fn a_new_stream_under_an_old_handle_inherits_no_order() {
    let sim = testing::sim();
    sim.context(0);
    let a = sim.stream();
    let bounded = Rules { cannot_grow: true, ..Rules::default() };
    let d = device(&sim, 0, 4 * MIB, &[(a, 2 * MIB)], bounded).unwrap();
    let p = d.malloc(MIB, a).unwrap();
    let gate = sim.gate(a);
    sim.memset(p, 1, MIB, a);
    sim.destroy(a);
    let again = (0..16).any(|_| sim.stream() == a);
    assert!(again, "simcuda gives a handle again, as the driver does");
    d.malloc(512, a).unwrap();
    let before = d.info(a).unwrap();
    d.free(p, a).unwrap();
    assert_eq!(d.info(a), Ok((before.0 + MIB, before.1)), "free in the books at once");
    assert_ne!(d.malloc(MIB, a), Ok(p), "the destroyed stream still writes");
    gate.open();
    sim.driver.ctx_synchronize().unwrap();
    d.check().unwrap();
}

/// Runs `act` in a thread of its own; whether it ended while stream `busy` was held back.
fn ends_beside(sim: &Sim, busy: Stream, act: impl FnOnce() + Send) -> bool {
    let gate = sim.gate(busy);
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            sim.context(0);
            act();
        });
        let start = std::time::Instant::now();
        while !thread.is_finished() && start.elapsed().as_secs() < 3 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let ended = thread.is_finished();
        gate.open();
        ended
    })
}

#[test]
fn nobody_waits_for_what_cannot_help() {
    let sim = testing::sim();
    sim.context(0);
    let (a, b, busy) = (sim.stream(), sim.stream(), sim.stream());
    let bounded = Rules { cannot_grow: true, ..Rules::default() };
    let d = device(&sim, 0, 4 * MIB, &[(a, 2 * MIB), (b, 2 * MIB)], bounded).unwrap();
    let refused = |size, s| matches!(d.malloc(size, s), Err(Error::OutOfMemory { .. }));
    assert!(ends_beside(&sim, busy, || assert!(refused(1 << 40, a))), "1 TiB out of 4 MiB");
    let p = d.malloc(2 * MIB, a).unwrap();
    assert!(ends_beside(&sim, busy, || assert!(refused(4 * MIB, b))), "half of it is live");
    d.free(p, a).unwrap();
    d.check().unwrap();
}

#[test]
fn growing_counts_what_was_asked() {
    let sim = testing::sim();
    sim.context(0);
    let a = sim.stream();
    let d = device(&sim, 0, 4096, &[(a, 0)], Rules::default()).unwrap();
    let p = d.malloc(8192, Stream::NULL).unwrap();
    assert_eq!(d.info(Stream::NULL), Ok((4096, 12288)));
    let q = d.malloc(3 * MIB + 512, a).unwrap();
    assert_eq!((d.info(Stream::NULL), d.info(a)), (Ok((4096, 12800 + 3 * MIB)), Ok((0, 3 * MIB + 512))));
    d.free(p, Stream::NULL).unwrap();
    assert_eq!(d.malloc(12288, Stream::NULL), Ok(p - 4096), "grown memory coalesces with what was there");
    d.free(q, a).unwrap();
    d.check().unwrap();
}

#[test]
fn a_stream_of_another_device_is_refused() {
    let sim = testing::sim();
    sim.context(1);
    let foreign = sim.stream();
    sim.context(0);
    let refused = device(&sim, 0, 4096, &[(foreign, 0)], Rules::default());
    assert!(matches!(refused, Err(Error::InvalidArgument)));
    let d = device(&sim, 0, 4096, &[], Rules::default()).unwrap();
    assert!(!d.owns(foreign));
    d.register(sim.stream()).unwrap();
}
