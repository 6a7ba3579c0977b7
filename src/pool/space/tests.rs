//! Free space without a device: placement, owners, regions, random operations. The table is the process's, so every test has
//! addresses of its own.

use super::*;
use crate::testing::Rng;

#[test]
fn exact_accounting_and_full_coalescing() {
    let mut s = Space::new().unwrap();
    let o = s.add_owner();
    s.add_region(0x1000_0000, 4096, o, Grain::Granule).unwrap();
    let a = s.alloc(o, 1024).unwrap();
    assert_eq!((s.free_bytes(o), s.used_bytes(o)), (3072, 1024));
    let b = s.alloc(o, 1).unwrap();
    assert_eq!(s.addr(b), s.addr(a) + 1024);
    assert_eq!(s.size(b), 512);
    assert!(s.alloc(o, 4096).is_none());
    assert_eq!(s.lookup(s.addr(b) + 512), None);
    s.free(a, o, 3);
    assert_eq!(s.lookup(0x1000_0000), None);
    let whole = s.free(b, o, 2);
    assert_eq!((s.size(whole), s.stamp(whole)), (4096, 3));
    assert!(s.alloc(o, 4096).is_some(), "the last byte can be had");
    assert_eq!(s.largest_free(o), 0);
    s.check().unwrap();
}

#[test]
fn owners_do_not_mix_until_told() {
    let mut s = Space::new().unwrap();
    let (a, b) = (s.add_owner(), s.add_owner());
    s.add_region(0x2000_0000, 8192, a, Grain::Granule).unwrap();
    let x = s.alloc(a, 4096).unwrap();
    let freed = s.free(x, b, 7);
    assert_eq!((s.free_bytes(a), s.free_bytes(b)), (4096, 4096));
    assert!(s.alloc(a, 8192).is_none());
    let whole = s.set_owner(freed, a);
    assert_eq!((s.size(whole), s.stamp(whole)), (8192, 7));
    let (first, rest) = s.split(whole, 512);
    s.set_owner(first, b);
    assert_eq!(s.size(rest.unwrap()), 7680);
    s.check().unwrap();
    s.set_owner(first, a);
    let whole = s.free_blocks(a)[0];
    assert!(s.remove_range(whole, 0x2000_0000, 8192));
    s.remove_owner(a);
    s.check().unwrap();
}

#[test]
fn huge_and_odd_sizes() {
    let mut s = Space::new().unwrap();
    let o = s.add_owner();
    s.add_region(1 << 40, 1 << 34, o, Grain::Page).unwrap();
    assert!(s.alloc(o, usize::MAX).is_none());
    assert!(s.alloc(o, 1 << 62).is_none());
    let b = s.alloc(o, (1 << 34) - 1).unwrap();
    assert_eq!(s.size(b), 1 << 34);
    assert!(s.add_region(1 << 48, 1 << 20, o, Grain::Page).is_none(), "beyond the table");
    s.forget_all();
    assert_eq!((s.lookup(1 << 40), s.used_total()), (None, 0));
    assert!(s.owns_nothing(o));
    s.check().unwrap();
}

#[test]
fn ranges_can_be_taken_out_of_a_region() {
    let base = 3 << 40;
    for (skip, size) in [(0, 4096), (0, 16384), (4096, 4096), (12288, 4096), (512, 1024)] {
        let mut s = Space::new().unwrap();
        let o = s.add_owner();
        let b = s.add_region(base, 16384, o, Grain::Granule).unwrap();
        assert!(s.remove_range(b, base + skip, size));
        s.check().unwrap();
        assert_eq!((s.total(), s.free_bytes(o)), (16384 - size, 16384 - size));
        // And comes back: one region, one block.
        let b = s.join_region(base + skip, size, o, Grain::Granule).unwrap();
        s.check().unwrap();
        assert_eq!((s.total(), s.size(b), s.addr(b)), (16384, 16384, base));
    }
    let mut s = Space::new().unwrap();
    let (a, b) = (s.add_owner(), s.add_owner());
    s.add_region(base, 16384, a, Grain::Granule).unwrap();
    let x = s.alloc(a, 4096).unwrap();
    let y = s.alloc(a, 4096).unwrap();
    let z = s.alloc(a, 4096).unwrap();
    s.free(y, b, 5);
    assert_eq!(s.free_runs(base), [(base + 4096, base + 8192, 5), (base + 12288, base + 16384, 0)]);
    let z = s.free(z, a, 6);
    assert_eq!(s.free_runs(base), [(base + 4096, base + 16384, 6)]);
    assert!(s.remove_range(z, base + 8192, 4096));
    s.check().unwrap();
    assert_eq!((s.free_bytes(b), s.free_bytes(a)), (4096, 4096));
    assert_eq!(s.lookup(base), Some(x));
    assert_eq!((s.containing(base + 100), s.containing(base + 5000), s.containing(base + 9000)), (Some(x), None, None));
}

#[test]
fn random_operations_keep_the_invariants() {
    let mut rng = Rng::new(1);
    let mut s = Space::new().unwrap();
    let owners: Vec<OwnerId> = (0..4).map(|_| s.add_owner()).collect();
    for r in 0..4u64 {
        s.add_region((5 << 40) + ((r + 1) << 30), 4 << 20, owners[r as usize], Grain::Granule).unwrap();
    }
    let mut live: Vec<(BlockId, u64, usize)> = Vec::new();
    for step in 0..60_000u64 {
        let o = owners[rng.below(4) as usize];
        match rng.below(8) {
            0..=3 => {
                let magnitude = 9 + rng.below(10);
                let size = 1 + rng.below(1 << magnitude) as usize;
                if let Some(b) = s.alloc(o, size) {
                    let (a, n) = (s.addr(b), s.size(b));
                    assert!(n >= size);
                    assert!(live.iter().all(|&(_, x, m)| a + n as u64 <= x || x + m as u64 <= a), "overlap");
                    live.push((b, a, n));
                } else {
                    assert!(s.largest_free(o) < size, "a block that fits was not found");
                }
            }
            4..=5 if !live.is_empty() => {
                let (b, a, _) = live.swap_remove(rng.below(live.len() as u64) as usize);
                assert_eq!(s.lookup(a), Some(b));
                s.free(b, o, step);
                assert_eq!(s.lookup(a), None);
            }
            6 if !live.is_empty() => {
                let (b, a, _) = live[rng.below(live.len() as u64) as usize];
                k(b).set_cached(true);
                assert_eq!(s.lookup(a), None, "a cached block is not live");
                k(b).set_cached(false);
            }
            _ => {
                let free = s.free_blocks(o);
                if let Some(&b) = free.get(rng.below(free.len().max(1) as u64) as usize) {
                    s.set_owner(b, owners[rng.below(4) as usize]);
                }
            }
        }
        if step % 64 == 0 {
            s.check().unwrap();
        }
    }
    for (b, _, _) in live {
        s.free(b, owners[0], 0);
    }
    s.check().unwrap();
    assert_eq!(owners.iter().map(|&o| s.free_bytes(o)).sum::<usize>(), 16 << 20);
}

#[test]
fn a_region_grows_at_its_end() {
    let mut s = Space::new().unwrap();
    let (a, b) = (s.add_owner(), s.add_owner());
    s.add_region(6 << 40, 4096, a, Grain::Granule).unwrap();
    assert!(s.extend_region((6 << 40) + 512, 512, b, Grain::Granule).is_none(), "no region ends there");
    let more = s.extend_region((6 << 40) + 4096, 8192, b, Grain::Granule).unwrap();
    assert_eq!((s.total(), s.free_bytes(a), s.free_bytes(b)), (12288, 4096, 8192));
    s.check().unwrap();
    s.set_owner(more, a);
    assert!(s.alloc(a, 12288).is_some(), "one region, coalesced");
    s.check().unwrap();
}
