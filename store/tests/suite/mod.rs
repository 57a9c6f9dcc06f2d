//! The cases, by subject. Each takes a world and knows nothing of the store in it.

pub(crate) mod around;
pub(crate) mod commit;
pub(crate) mod drain;
pub(crate) mod lifecycle;
pub(crate) mod mutex;
pub(crate) mod reads;
