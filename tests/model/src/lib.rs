//! A model check of the library's lock-free parts. The sources are the library's own; `crate::sync` and `crate::driver` are loom's types
//! and a device of three counters. loom runs a test once for every order of steps that matters (within its bound on preemptions) and
//! every value that the memory model allows a load to see.
#![cfg(test)]

pub mod driver;
pub mod sync;

#[allow(dead_code)]
#[path = "../../../src/pool/fence.rs"]
mod fence;
#[path = "../../../src/cache/handover.rs"]
mod handover;

mod fences;
mod magazines;
