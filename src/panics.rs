//! Panics: what they say, and where that goes.

use std::any::Any;

/// From now on every panic is one log line, in the format of all the others.
pub(crate) fn log() {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string);
        let thread = std::thread::current().name().map(str::to_owned);
        tracing::error!(place, thread, reason = text_of(panic.payload()), "panic");
    }));
}

/// What a caught panic said.
pub(crate) fn text(payload: &(dyn Any + Send)) -> &str {
    text_of(payload)
}

fn text_of(payload: &dyn Any) -> &str {
    match payload.downcast_ref::<&str>() {
        Some(text) => text,
        None => payload.downcast_ref::<String>().map_or("a panic without a text", String::as_str),
    }
}
