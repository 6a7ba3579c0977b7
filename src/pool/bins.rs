//! Bins: the geometric size classes of CUB's caching allocator, with steps between the powers.
//!
//! A bin's size is `min * growth^i`, or one of `steps` equal steps on the way to the next power, rounded up to the granule.
//! With growth 2 and 8 steps rounding wastes at most 12.5 %; 1 step is CUB's own behaviour.

use std::sync::Arc;

use super::space::GRANULE;

pub struct BinTable {
    /// Bin sizes in bytes, ascending, each a multiple of the granule.
    sizes: Vec<usize>,
    /// The bin of every size up to `INDEXED`, by granules.
    index: Arc<[u16]>,
}

/// Where a size's bin stands in the index: granules, less one. Of size 0, nowhere.
#[inline(always)]
pub fn granules(size: usize) -> usize {
    size.wrapping_sub(1) / GRANULE
}

/// Bytes up to which the bin is looked up and not searched.
const INDEXED: usize = 4 << 20;

impl BinTable {
    /// `min` and `max` in bytes; sizes above the last bin at or under `max` have no bin.
    pub fn new(growth: u32, steps: u32, min: usize, max: usize) -> BinTable {
        let mut sizes = Vec::new();
        let (growth, steps) = (growth.max(2) as usize, steps.max(1) as usize);
        let mut power = min.max(1);
        'powers: while power <= max {
            for step in 0..steps {
                let add = (power as u128 * (growth as u128 - 1) * step as u128 / steps as u128) as usize;
                let Some(size) = power.checked_add(add).and_then(|s| s.checked_next_multiple_of(GRANULE)) else {
                    break 'powers;
                };
                if size > max.next_multiple_of(GRANULE) {
                    break 'powers;
                }
                if sizes.last() != Some(&size) {
                    sizes.push(size);
                }
            }
            match power.checked_mul(growth) {
                Some(next) => power = next,
                None => break,
            }
        }
        let last = sizes.last().copied().unwrap_or(0).min(INDEXED);
        let bin = |granules: usize| sizes.partition_point(|&bin| bin < granules * GRANULE) as u16;
        let index = (1..=last / GRANULE).map(bin).collect();
        BinTable { sizes, index }
    }

    /// Bytes of every bin, ascending.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// The bin of every size that is looked up, by `granules`.
    pub fn index(&self) -> Arc<[u16]> {
        self.index.clone()
    }

    pub fn len(&self) -> usize {
        self.sizes.len()
    }

    /// The smallest bin that holds `size` bytes. None for sizes above the last bin.
    #[inline]
    pub fn of(&self, size: usize) -> Option<usize> {
        match self.index.get(granules(size)) {
            Some(&bin) => Some(bin as usize),
            None => self.fit(size).map(|(bin, _)| bin),
        }
    }

    /// The same, with the bin's size in bytes.
    pub fn fit(&self, size: usize) -> Option<(usize, usize)> {
        let i = match self.index.get(granules(size)) {
            Some(&bin) => bin as usize,
            None => self.sizes.partition_point(|&bin| bin < size),
        };
        self.sizes.get(i).map(|&bin| (i, bin))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_steps_waste_an_eighth_at_most() {
        let t = BinTable::new(2, 8, 512, 1 << 20);
        for size in (1..=(1 << 20)).step_by(97) {
            let (_, bin) = t.fit(size).unwrap();
            assert!(bin >= size && bin.is_multiple_of(GRANULE));
            assert!(bin - size < GRANULE || (bin - size) * 8 <= size, "{size} -> {bin}");
        }
        assert_eq!(t.fit(1 << 20).unwrap().1, 1 << 20);
        assert!(t.fit((1 << 20) + 1).is_none());
        assert_eq!(t.fit(4096).unwrap().1, 4096);
    }

    #[test]
    fn one_step_is_cub() {
        let t = BinTable::new(8, 1, 512, 2 << 20);
        let sizes: Vec<usize> = [1, 513, 4097, 32769, 262145].iter().map(|&s| t.fit(s).unwrap().1).collect();
        assert_eq!(sizes, [512, 4096, 32768, 262144, 2097152]);
        assert_eq!(t.len(), 5);
    }

    #[test]
    fn odd_parameters_do_not_hang_or_overflow() {
        assert_eq!(BinTable::new(2, 8, 1 << 20, 512).len(), 0);
        assert!(BinTable::new(2, 8, 1, usize::MAX >> 1).len() > 100);
        assert!(BinTable::new(0, 0, 0, 4096).len() > 1);
    }
}
