//! Pages on simcuda: how segments are made of them, and a refusal at every step (case S6).

use super::*;
use crate::testing::{Sim, sim};

const MIB: usize = 1 << 20;
/// Three pages of the largest size and one of 4 MiB, on simcuda's 8 GiB.
const SIZE: usize = 100 * MIB;

/// What a leak would change: handles and mappings alive, free bytes of the device, free addresses.
fn books(sim: &Sim, source: &VmmSource) -> (i64, i64, usize, usize) {
    let free = sim.driver.mem_info().unwrap().0;
    (sim.live("handles"), sim.live("mappings"), free, source.ground.iter().map(|g| g.1.lock().free_bytes()).sum())
}

fn source(sim: &Sim) -> VmmSource {
    sim.context(0);
    vmm(sim.driver, 0).expect("simcuda has VMM")
}

#[test]
fn a_segment_is_pages_side_by_side() {
    let sim = sim();
    let source = source(&sim);
    let before = books(&sim, &source);
    let segment = source.acquire(Arena::Large, SIZE - 1).unwrap();
    assert_eq!(segment.size, SIZE, "rounded up to the granularity");
    let sizes: Vec<usize> = segment.pages().map(|p| p.1 / MIB).collect();
    assert_eq!(sizes, [32, 32, 32, 4]);
    let end = segment.pages().fold(segment.base, |at, (base, size)| {
        assert_eq!(base, at);
        at + size as u64
    });
    assert_eq!(end, segment.base + SIZE as u64);
    source.release(segment).unwrap();
    assert_eq!(books(&sim, &source), before);
}

#[test]
fn a_segment_goes_back_in_pages() {
    let sim = sim();
    let source = source(&sim);
    let before = books(&sim, &source);
    let segment = source.acquire(Arena::Large, SIZE).unwrap();
    let base = segment.base;
    let pages: Vec<Segment> = segment.into_pages().collect();
    let seen: Vec<_> = pages.iter().map(|s| ((s.base - base) as usize / MIB, s.size / MIB)).collect();
    assert_eq!(seen, [(0, 32), (32, 32), (64, 32), (96, 4)]);
    let (taken, kept): (Vec<_>, Vec<_>) = pages.into_iter().partition(|s| s.base == base || s.size == 4 * MIB);
    taken.into_iter().for_each(|s| source.release(s).unwrap());
    // What stayed is whole and usable while its neighbours are gone.
    assert_eq!(before.2 - sim.driver.mem_info().unwrap().0, 64 * MIB);
    let s = sim.stream();
    sim.memset(kept[0].base, 7, kept[0].size, s);
    sim.destroy(s);
    sim.driver.ctx_synchronize().unwrap();
    kept.into_iter().for_each(|s| source.release(s).unwrap());
    assert_eq!(books(&sim, &source), before);
}

#[test]
fn pages_move_to_where_they_are_needed() {
    let sim = sim();
    let source = source(&sim);
    let before = books(&sim, &source);
    let mut pages: Vec<Segment> = source.acquire(Arena::Large, SIZE).unwrap().into_pages().collect();
    let stays = pages.remove(1);
    let free = sim.driver.mem_info().unwrap().0;
    // 68 MiB are there; 4 MiB are made.
    let moved = source.gather(Arena::Large, None, pages, 72 * MIB, 32 * MIB).unwrap();
    assert_eq!((moved.size, free - sim.driver.mem_info().unwrap().0), (72 * MIB, 4 * MIB));
    let end = moved.base + moved.size as u64;
    assert!(end <= stays.base || stays.base + stays.size as u64 <= moved.base);
    let s = sim.stream();
    sim.memset(moved.base, 9, moved.size, s);
    sim.driver.ctx_synchronize().unwrap();
    // What cannot be mapped anew goes back whole.
    for call in ["cuMemCreate:1", "cuMemMap:2", "cuMemSetAccess:1"] {
        let pages = source.acquire(Arena::Large, 64 * MIB).unwrap().into_pages().collect();
        sim.fail(call);
        let refused = source.gather(Arena::Large, None, pages, 80 * MIB, 32 * MIB).map(|s| s.base);
        sim.fail("");
        assert_eq!(refused, Err(CuError::OUT_OF_MEMORY), "{call}");
    }
    // More than there is: the pages go back all the same.
    let pages = source.acquire(Arena::Large, 64 * MIB).unwrap().into_pages().collect();
    let refused = source.gather(Arena::Large, None, pages, usize::MAX / 4, 32 * MIB).map(|s| s.base);
    assert_eq!(refused, Err(CuError::OUT_OF_MEMORY));
    // At the end of what is there, when those addresses are free.
    let next = source.gather(Arena::Large, Some(end), Vec::new(), 2 * MIB, 2 * MIB).unwrap();
    assert_eq!(next.base, end);
    let other = source.gather(Arena::Large, Some(stays.base), Vec::new(), 6 * MIB, 2 * MIB).unwrap();
    assert_ne!(other.base, stays.base);
    assert_eq!(other.pages().map(|p| p.1).collect::<Vec<_>>(), [2 * MIB; 3]);
    for segment in [moved, stays, next, other] {
        source.release(segment).unwrap();
    }
    assert_eq!(books(&sim, &source), before);
}

#[test]
fn a_refusal_at_any_step_leaves_nothing_held() {
    let sim = sim();
    let source = source(&sim);
    let before = books(&sim, &source);
    let pages = SIZE.div_ceil(PAGE_MAX);
    for (call, times) in [("cuMemCreate", pages), ("cuMemMap", pages), ("cuMemSetAccess", 1)] {
        for nth in 1..=times {
            // Without memory, or for a reason of its own: to the pool both are "no memory now".
            for code in if call == "cuMemSetAccess" { &[2][..] } else { &[2, 304] } {
                sim.fail(&format!("{call}:{nth}:{code}"));
                let refused = source.acquire(Arena::Large, SIZE).map(|s| s.base);
                sim.fail("");
                assert_eq!(refused, Err(CuError::OUT_OF_MEMORY), "{call}:{nth}:{code}");
                assert_eq!(books(&sim, &source), before, "{call}:{nth}:{code}");
            }
        }
    }
    // Errors that no retry helps are told as they are.
    sim.fail("cuMemMap:2:999");
    assert_eq!(source.acquire(Arena::Large, SIZE).map(|s| s.base), Err(CuError(999)));
    sim.fail("");
    let segment = source.acquire(Arena::Large, SIZE).expect("the next one succeeds");
    source.release(segment).unwrap();
    assert_eq!(books(&sim, &source), before);
}

#[test]
fn pages_that_cannot_be_shared_are_made_plain() {
    let sim = sim();
    let source = source(&sim);
    let before = books(&sim, &source);
    for code in [1, 801] {
        sim.fail(&format!("cuMemCreate:1:{code}"));
        let segment = source.acquire(Arena::Large, 4 * MIB);
        sim.fail("");
        source.release(segment.expect("a plain page")).unwrap();
        assert_eq!(books(&sim, &source), before);
    }
}

#[test]
fn a_failed_unmap_keeps_its_addresses_and_the_rest_goes_back() {
    let sim = sim();
    let source = source(&sim);
    let before = books(&sim, &source);
    let segment = source.acquire(Arena::Large, SIZE).unwrap();
    let (stuck, bytes) = segment.pages().nth(1).unwrap();
    sim.fail("cuMemUnmap:2:999,cuMemUnmap:3:998");
    let (stuck_too, more) = segment.pages().nth(2).unwrap();
    let told = source.release(segment);
    sim.fail("");
    assert_eq!(told, Err(CuError(999)), "the first error is told");
    let now = books(&sim, &source);
    assert_eq!((now.1 - before.1, before.3 - now.3), (2, bytes + more), "the other pages went back");
    // Nothing is mapped over a page that is still there.
    let next = source.acquire(Arena::Large, SIZE).unwrap();
    let end = next.base + SIZE as u64;
    for (at, n) in [(stuck, bytes), (stuck_too, more)] {
        assert!(end <= at || at + n as u64 <= next.base, "{:#x} is over the page at {at:#x}", next.base);
    }
    source.release(next).unwrap();
    for (at, n) in [(stuck, bytes), (stuck_too, more)] {
        sim.driver.page_unmap(at, n).unwrap();
        source.ranges_of(at).lock().give(at, n);
    }
    assert_eq!(books(&sim, &source), before);
}

#[test]
fn a_failed_release_does_not_stop_the_others() {
    let sim = sim();
    let source = source(&sim);
    let before = books(&sim, &source);
    let segment = source.acquire(Arena::Large, SIZE).unwrap();
    let first = segment.parts[0].0;
    sim.fail("cuMemRelease:1:999");
    let told = source.release(segment);
    sim.fail("");
    assert_eq!(told, Err(CuError(999)));
    assert_eq!(sim.live("handles"), before.0 + 1, "only the refused handle stays");
    sim.driver.page_release(first).unwrap();
    assert_eq!(books(&sim, &source), before);
}

#[test]
fn more_than_there_is_asks_for_nothing() {
    let sim = sim();
    let source = source(&sim);
    let before = books(&sim, &source);
    for size in [usize::MAX, usize::MAX / 2, source.total + 1, source.total * RESERVE_FACTOR * 2] {
        assert_eq!(source.acquire(Arena::Large, size).map(|s| s.base), Err(CuError::OUT_OF_MEMORY), "{size}");
    }
    assert_eq!(books(&sim, &source), before);
}
