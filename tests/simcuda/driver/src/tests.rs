//! Tests of the whole driver.
