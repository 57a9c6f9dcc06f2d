
//! The real core and the real consumer decisions under one seed that decides everything.
