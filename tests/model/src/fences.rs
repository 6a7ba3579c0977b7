//! The fences: what they call ordered is ordered, what they call finished is done.

use loom::sync::Arc;

use crate::driver::{Context, Driver};
use crate::fence::Fences;

fn model(run: impl Fn(&'static Driver, Arc<Fences>) + Send + Sync + 'static) {
    let mut bounded = loom::model::Builder::new();
    bounded.preemption_bound = Some(2);
    bounded.check(move || {
        // Fences hold their driver for ever; a model's is small.
        let driver: &'static Driver = Box::leak(Box::default());
        run(driver, Arc::new(Fences::new(driver, Context(1))));
    });
}

/// Whoever is told that memory is ordered, or finished, looks whether its last work is.
fn look(driver: &Driver, fences: &Fences, frees: &[(u64, u64)]) {
    for &(work, stamp) in frees {
        if stamp <= fences.ordered() && !fences.is_finished(stamp) {
            assert!(driver.ordered() >= work || driver.done() >= work, "stamp {stamp} is not ordered");
        }
        if fences.is_finished(stamp) {
            assert!(driver.done() >= work, "stamp {stamp} is not finished");
        }
    }
}

#[test]
fn a_bar_covers_every_free_that_it_frees() {
    model(|driver, fences| {
        let free = |fences: &Fences| {
            let work = driver.submit();
            (work, fences.mark())
        };
        let other = {
            let fences = fences.clone();
            loom::thread::spawn(move || {
                let mine = free(&fences);
                fences.bar().unwrap();
                mine
            })
        };
        let mine = [free(&fences), free(&fences)];
        fences.bar().unwrap();
        look(driver, &fences, &mine);
        let theirs = other.join().unwrap();
        look(driver, &fences, &[mine[0], mine[1], theirs]);
        assert!(mine[1].1 <= fences.ordered(), "a bar after a free orders it");
    });
}

#[test]
fn what_is_called_finished_is_done() {
    model(|driver, fences| {
        let other = {
            let fences = fences.clone();
            loom::thread::spawn(move || {
                // One free with a stream and one without.
                let with = (driver.submit(), fences.stamp());
                let without = (driver.submit(), fences.mark());
                [with, without]
            })
        };
        let mine = (driver.submit(), fences.stamp());
        fences.close().unwrap();
        driver.finish();
        fences.poll().unwrap();
        look(driver, &fences, &[mine]);
        assert!(fences.is_finished(mine.1), "closed after it, and done");
        let theirs = other.join().unwrap();
        look(driver, &fences, &theirs);
        fences.wait(theirs[1].1).unwrap();
        look(driver, &fences, &theirs);
    });
}

#[test]
fn bars_closings_and_polls_at_once() {
    model(|driver, fences| {
        let other = {
            let fences = fences.clone();
            loom::thread::spawn(move || {
                fences.close().unwrap();
                driver.finish();
                fences.poll().unwrap();
            })
        };
        let mine = (driver.submit(), fences.mark());
        fences.bar().unwrap();
        look(driver, &fences, &[mine]);
        other.join().unwrap();
        look(driver, &fences, &[mine]);
    });
}

/// The device does no more than what is waited for: a free that comes in meanwhile is not taken for finished.
#[test]
fn a_free_beside_a_closing_is_not_finished_by_it() {
    model(|driver, fences| {
        let other = {
            let fences = fences.clone();
            loom::thread::spawn(move || (driver.submit(), fences.stamp()))
        };
        let mine = (driver.submit(), fences.stamp());
        fences.close().unwrap();
        fences.wait(mine.1).unwrap();
        let theirs = other.join().unwrap();
        look(driver, &fences, &[mine, theirs]);
    });
}
