//! What applications link. So far the decision parts of consumer and producer, pure: events in, actions out (protocol 11).

pub mod decision;
