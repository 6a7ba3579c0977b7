//! `SIMCUDA_TRACE`: one line for each driver call, its name and its result.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::OnceLock;

fn file() -> Option<&'static File> {
    static FILE: OnceLock<Option<File>> = OnceLock::new();
    FILE.get_or_init(|| {
        let path = std::env::var_os("SIMCUDA_TRACE").filter(|p| !p.is_empty())?;
        match OpenOptions::new().create(true).append(true).open(&path) {
            Ok(file) => Some(file),
            Err(error) => {
                eprintln!("simcuda: SIMCUDA_TRACE: {error}");
                std::process::abort()
            }
        }
    })
    .as_ref()
}

/// One write a line, in append mode, so that the lines of several threads and processes stay whole.
pub fn line(name: &str, result: u32) {
    if let Some(mut file) = file() {
        let _ = file.write_all(format!("{name} {result}\n").as_bytes());
    }
}
