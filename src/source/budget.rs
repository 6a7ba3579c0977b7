//! This process's share of a device: `GPUPOOL_MAX_MEM` and `GPUPOOL_MAX_MEM_PERCENT`, for all sources together. Hard when set; unset,
//! nothing is refused here.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use once_cell::sync::Lazy;
use parking_lot::Mutex;

use crate::config;
use crate::driver::{CuError, CuResult, Driver};

pub struct Budget {
    /// Bytes.
    limit: Option<usize>,
    taken: AtomicUsize,
}

/// One a device, for the life of the process.
static BUDGETS: Lazy<Mutex<HashMap<i32, &'static Budget>>> = Lazy::new(Default::default);

/// The budget of device `ordinal`.
pub fn of(driver: &Driver, ordinal: i32) -> CuResult<&'static Budget> {
    let known = BUDGETS.lock().get(&ordinal).copied();
    if let Some(budget) = known {
        return Ok(budget);
    }
    let config = config::get();
    let total = driver.device_total(ordinal)?;
    let share = config.max_mem_percent.map(|p| (total as f64 * p / 100.0) as usize);
    let limit = [config.max_mem, share].into_iter().flatten().min();
    let make = || &*Box::leak(Box::new(Budget { limit, taken: AtomicUsize::new(0) }));
    Ok(BUDGETS.lock().entry(ordinal).or_insert_with(make))
}

impl Budget {
    pub fn limit(&self) -> Option<usize> {
        self.limit
    }

    /// Bytes that the process's sources hold on the device.
    pub fn taken(&self) -> usize {
        self.taken.load(Relaxed)
    }

    /// Bytes that the limit leaves; None without a limit.
    pub fn left(&self) -> Option<usize> {
        self.limit.map(|limit| limit.saturating_sub(self.taken()))
    }

    /// `OUT_OF_MEMORY`, and nothing is taken, when the limit would be passed.
    pub fn take(&self, size: usize) -> CuResult<()> {
        let limit = self.limit.unwrap_or(usize::MAX);
        let within = |taken: usize| taken.checked_add(size).filter(|&sum| sum <= limit);
        self.taken.fetch_update(Relaxed, Relaxed, within).map(|_| ()).map_err(|_| CuError::OUT_OF_MEMORY)
    }

    pub fn give(&self, size: usize) {
        self.taken.fetch_sub(size, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_holds_to_the_byte_and_no_limit_refuses_nothing() {
        let b = Budget { limit: Some(100), taken: AtomicUsize::new(0) };
        assert_eq!((b.take(60), b.take(41), b.take(40)), (Ok(()), Err(CuError::OUT_OF_MEMORY), Ok(())));
        assert_eq!((b.left(), b.taken()), (Some(0), 100));
        b.give(60);
        assert_eq!((b.take(usize::MAX), b.left()), (Err(CuError::OUT_OF_MEMORY), Some(60)));
        let free = Budget { limit: None, taken: AtomicUsize::new(0) };
        assert_eq!((free.take(1 << 60), free.left()), (Ok(()), None));
    }
}
