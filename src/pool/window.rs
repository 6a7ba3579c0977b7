//! Where a large request goes when no free block fits it: into a window between live blocks, of which some is free memory already, so
//! that only the rest has to be mapped. Addresses alone; no driver call, no lock.

/// A piece of a gap between two live blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    pub start: u64,
    pub size: usize,
    /// Free memory; else addresses with nothing behind them.
    pub mapped: bool,
}

/// Addresses to be mapped: `need` bytes from `base` on, `room` bytes at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hole {
    pub base: u64,
    pub need: usize,
    pub room: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    pub start: u64,
    pub end: u64,
    /// In the order of addresses.
    pub holes: Vec<Hole>,
    /// Bytes to be mapped, in whole pages.
    pub lacking: usize,
}

/// The window of at least `want` bytes that lacks the least. Holes are multiples of the driver's granularity, and so is `page`, the
/// size that what is lacking is reckoned in.
pub fn best(gaps: &[Vec<Stretch>], want: usize, page: usize) -> Option<Window> {
    let mut best: Option<Window> = None;
    let mut offer = |window: Option<Window>| {
        if let Some(w) = window
            && best.as_ref().is_none_or(|b| w.lacking < b.lacking)
        {
            best = Some(w);
        }
    };
    for gap in gaps {
        let whole = gap.iter().fold(0usize, |sum, s| sum.saturating_add(s.size));
        if whole < want {
            continue;
        }
        for (i, stretch) in gap.iter().enumerate().filter(|(_, s)| s.mapped) {
            offer(forward(&gap[i..], want, page));
            let mut before: Vec<Stretch> = gap[..=i].to_vec();
            before.reverse();
            offer(backward(&before, want, page, stretch.start + stretch.size as u64));
        }
    }
    best
}

/// From the start of the first stretch on.
fn forward(stretches: &[Stretch], want: usize, page: usize) -> Option<Window> {
    let (mut got, mut holes, mut lacking) = (0, Vec::new(), 0);
    for s in stretches {
        if got >= want {
            break;
        }
        let mut take = s.size;
        if !s.mapped {
            let need = s.size.min(want - got);
            take = need.next_multiple_of(page).min(s.size);
            lacking += take;
            holes.push(Hole { base: s.start, need, room: s.size });
        }
        got += take;
    }
    let start = stretches[0].start;
    (got >= want).then_some(Window { start, end: start + want as u64, holes, lacking })
}

/// From `end` downwards; the stretches come in falling order.
fn backward(stretches: &[Stretch], want: usize, page: usize, end: u64) -> Option<Window> {
    let (mut got, mut holes, mut lacking) = (0, Vec::new(), 0);
    for s in stretches {
        if got >= want {
            break;
        }
        let mut take = s.size;
        if !s.mapped {
            take = (want - got).next_multiple_of(page).min(s.size);
            lacking += take;
            // The part that borders on what follows, and no more: there is nothing to be joined below.
            holes.insert(0, Hole { base: s.start + (s.size - take) as u64, need: take, room: take });
        }
        got += take;
    }
    (got >= want).then(|| Window { start: end - want as u64, end, holes, lacking })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 16;

    fn mapped(start: u64, size: usize) -> Stretch {
        Stretch { start, size, mapped: true }
    }
    fn hole(start: u64, size: usize) -> Stretch {
        Stretch { start, size, mapped: false }
    }

    #[test]
    fn a_window_lacks_as_little_as_can_be() {
        let gaps = vec![
            vec![mapped(0, 100), hole(100, 160)],
            vec![hole(1000, 64), mapped(1064, 150), hole(1214, 16), mapped(1230, 40)],
            vec![mapped(5000, 199)],
        ];
        let w = best(&gaps, 200, PAGE).unwrap();
        assert_eq!((w.start, w.end, w.lacking), (1064, 1264, 16));
        assert_eq!(w.holes, [Hole { base: 1214, need: 16, room: 16 }]);
        // Downwards into a hole, whose upper end alone is needed.
        let w = best(&gaps[1..2], 230, PAGE).unwrap();
        assert_eq!((w.start, w.end, w.lacking), (1040, 1270, 48));
        assert_eq!(w.holes, [Hole { base: 1032, need: 32, room: 32 }, Hole { base: 1214, need: 16, room: 16 }]);
        // Upwards, where there is room for whole pages.
        let w = best(&gaps[..1], 230, PAGE).unwrap();
        assert_eq!((w.start, w.lacking), (0, 144));
        assert_eq!(w.holes, [Hole { base: 100, need: 130, room: 160 }]);
        assert_eq!(best(&gaps, 300, PAGE), None);
    }
}
