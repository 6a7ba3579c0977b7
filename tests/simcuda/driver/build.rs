fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // As the real driver: its own references to its functions are never interposed by a preloaded library.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
