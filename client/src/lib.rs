//! What applications link. So far the consumer's decision part, pure: events in, actions out (protocol 11).

pub mod decision;
