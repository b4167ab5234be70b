//! Custom resources; being written.
