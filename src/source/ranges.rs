//! Free address ranges within a reservation: lowest address first, so that addresses stay dense.

use std::collections::BTreeMap;

pub struct Ranges {
    /// Start -> bytes of every free range; neighbours are always merged.
    free: BTreeMap<u64, usize>,
}

impl Ranges {
    pub fn new(base: u64, size: usize) -> Ranges {
        Ranges { free: BTreeMap::from([(base, size)]) }
    }

    pub fn take(&mut self, size: usize) -> Option<u64> {
        let (&base, &whole) = self.free.iter().find(|&(_, &n)| n >= size)?;
        self.free.remove(&base);
        if whole > size {
            self.free.insert(base + size as u64, whole - size);
        }
        Some(base)
    }

    /// Exactly the range from `base` on; false when part of it is taken.
    pub fn take_at(&mut self, base: u64, size: usize) -> bool {
        let Some((&start, &whole)) = self.free.range(..=base).next_back() else { return false };
        let (end, free_end) = (base.saturating_add(size as u64), start + whole as u64);
        if end > free_end {
            return false;
        }
        self.free.remove(&start);
        if start < base {
            self.free.insert(start, (base - start) as usize);
        }
        if end < free_end {
            self.free.insert(end, (free_end - end) as usize);
        }
        true
    }

    pub fn give(&mut self, mut base: u64, mut size: usize) {
        if let Some((&before, &n)) = self.free.range(..base).next_back()
            && before + n as u64 == base
        {
            self.free.remove(&before);
            (base, size) = (before, size + n);
        }
        if let Some(n) = self.free.remove(&(base + size as u64)) {
            size += n;
        }
        self.free.insert(base, size);
    }

    #[cfg(test)]
    pub fn free_bytes(&self) -> usize {
        self.free.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    #[test]
    fn ranges_never_overlap_and_merge_again() {
        let mut ranges = Ranges::new(1 << 40, 1 << 30);
        let mut taken: Vec<(u64, usize)> = Vec::new();
        let mut rng = Rng::new(3);
        for _ in 0..20_000 {
            if taken.len() < 50 && rng.below(2) == 0 {
                let size = (1 + rng.below(16) as usize) << 21;
                // Now and then at a place of the caller's choice, which may be taken.
                let at = (1 << 40) + ((rng.below(512)) << 21);
                let base = match rng.below(3) {
                    0 => ranges.take_at(at, size).then_some(at),
                    _ => ranges.take(size),
                };
                if let Some(base) = base {
                    assert!(taken.iter().all(|&(b, n)| base + size as u64 <= b || b + n as u64 <= base), "overlap");
                    taken.push((base, size));
                }
            } else if !taken.is_empty() {
                let (base, size) = taken.swap_remove(rng.below(taken.len() as u64) as usize);
                ranges.give(base, size);
            }
            assert_eq!(ranges.free_bytes() + taken.iter().map(|t| t.1).sum::<usize>(), 1 << 30);
        }
        taken.into_iter().for_each(|(b, n)| ranges.give(b, n));
        assert_eq!(ranges.free, BTreeMap::from([(1 << 40, 1 << 30)]));
    }
}
