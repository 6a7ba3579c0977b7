//! The environment variables, read once.

use std::sync::OnceLock;

pub struct Config {
    pub devices: i32,
    /// Bytes of memory of each device.
    pub memory: u64,
    pub vmm: bool,
    /// As `cuDriverGetVersion` gives it.
    pub version: i32,
}

pub fn get() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| Config {
        devices: number("SIMCUDA_DEVICES", 2),
        memory: bytes("SIMCUDA_MEM", 8 << 30),
        vmm: number("SIMCUDA_VMM", 1) != 0,
        version: number("SIMCUDA_DRIVER", 13000),
    })
}

pub fn number(name: &str, default: i32) -> i32 {
    read(name, default, |s| s.parse().ok())
}

fn bytes(name: &str, default: u64) -> u64 {
    read(name, default, parse_bytes)
}

/// A test double that misreads its settings makes tests pass for the wrong reason: stop.
fn read<T>(name: &str, default: T, parse: impl Fn(&str) -> Option<T>) -> T {
    match std::env::var(name) {
        Ok(text) if !text.trim().is_empty() => parse(text.trim()).unwrap_or_else(|| {
            eprintln!("simcuda: {name}={text} cannot be read");
            std::process::abort()
        }),
        _ => default,
    }
}

fn parse_bytes(text: &str) -> Option<u64> {
    let (digits, shift) = match text.chars().last()?.to_ascii_lowercase() {
        'k' => (&text[..text.len() - 1], 10),
        'm' => (&text[..text.len() - 1], 20),
        'g' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    #[test]
    fn byte_sizes() {
        assert_eq!(super::parse_bytes("512"), Some(512));
        assert_eq!(super::parse_bytes("64k"), Some(65536));
        assert_eq!(super::parse_bytes("3G"), Some(3 << 30));
        assert_eq!(super::parse_bytes("x"), None);
    }
}
