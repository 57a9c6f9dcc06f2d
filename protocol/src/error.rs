//! The one table of error codes: code → HTTP status → what a client does (protocol 8).

use serde::{Deserialize, Serialize};

/// What a client should do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum ClientAction {
    /// The request is wrong and will stay wrong: correct it, or tell a person.
    FixRequest,
    /// Log in, or use an account with the needed role.
    Authenticate,
    /// What was named does not exist: check the name, or create it.
    CheckName,
    /// The state forbids it: read the current state, then decide.
    Reread,
    /// Nothing was changed, or it cannot be known: try the same request again after `Retry-After`.
    Retry,
    /// A person has to repair something first; retrying is safe and succeeds once that is done.
    CallOperator,
}

macro_rules! error_codes {
    ($($(#[$doc:meta])* $variant:ident = ($code:literal, $http:literal, $action:ident)),+ $(,)?) => {
        /// A code that a client can act upon; its documentation page is `docs/errors/<CODE>.md`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum ErrorCode {
            $($(#[$doc])* #[serde(rename = $code)] $variant),+
        }

        impl ErrorCode {
            /// Every code, in the order of the table.
            pub const ALL: &'static [ErrorCode] = &[$(ErrorCode::$variant),+];

            /// The code as it stands on the wire.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(ErrorCode::$variant => $code),+ }
            }

            /// The HTTP status that carries this code.
            #[must_use]
            pub fn http_status(self) -> u16 {
                match self { $(ErrorCode::$variant => $http),+ }
            }

            /// What a client should do about it.
            #[must_use]
            pub fn client_action(self) -> ClientAction {
                match self { $(ErrorCode::$variant => ClientAction::$action),+ }
            }
        }
    };
}

error_codes! {
    /// The body, path or query breaks the schema or a limit.
    InvalidRequest = ("INVALID_REQUEST", 400, FixRequest),
    /// No or wrong credentials.
    Unauthorized = ("UNAUTHORIZED", 401, Authenticate),
    /// The account lacks the role.
    Forbidden = ("FORBIDDEN", 403, Authenticate),
    /// No such route.
    NotFound = ("NOT_FOUND", 404, FixRequest),
    /// The group was never created, or was deleted through the API.
    GroupNotFound = ("GROUP_NOT_FOUND", 404, CheckName),
    /// No group exists on the stream prefix.
    StreamNotFound = ("STREAM_NOT_FOUND", 404, CheckName),
    /// No migration of that id is recorded.
    MigrationNotFound = ("MIGRATION_NOT_FOUND", 404, CheckName),
    /// The route exists, with other methods.
    MethodNotAllowed = ("METHOD_NOT_ALLOWED", 405, FixRequest),
    /// A group of that name exists already.
    GroupAlreadyExists = ("GROUP_ALREADY_EXISTS", 409, Reread),
    /// The stream prefix has groups already.
    StreamPrefixAlreadyExists = ("STREAM_PREFIX_ALREADY_EXISTS", 409, Reread),
    /// Deleting a group with live members needs `force`.
    GroupHasActiveMembers = ("GROUP_HAS_ACTIVE_MEMBERS", 409, Reread),
    /// A migration of the stream prefix is running.
    ActiveMigrationExists = ("ACTIVE_MIGRATION_EXISTS", 409, Reread),
    /// A metadata correction round is running.
    MetadataSyncInProgress = ("METADATA_SYNC_IN_PROGRESS", 409, Reread),
    /// The stream has another shard count than the one asked for.
    ShardCountMismatch = ("SHARD_COUNT_MISMATCH", 409, Reread),
    /// Another (stream prefix, consumer group) pair owns the same Redis key.
    GroupKeyCollision = ("GROUP_KEY_COLLISION", 409, FixRequest),
    /// The state moved while the mutation was applied, again and again.
    StateVersionConflict = ("STATE_VERSION_CONFLICT", 409, Retry),
    /// The body is larger than `server.max-body`.
    PayloadTooLarge = ("PAYLOAD_TOO_LARGE", 413, FixRequest),
    /// The body is not JSON.
    UnsupportedMediaType = ("UNSUPPORTED_MEDIA_TYPE", 415, FixRequest),
    /// The migration has gone too far to be rolled back.
    RollbackNotAllowed = ("ROLLBACK_NOT_ALLOWED", 422, Reread),
    /// The group has `coordination.max-members-per-group` live members.
    GroupMaxSizeReached = ("GROUP_MAX_SIZE_REACHED", 422, CallOperator),
    /// Too many requests from this caller.
    RateLimitExceeded = ("RATE_LIMIT_EXCEEDED", 429, Retry),
    /// A fault of the coordinator; the message carries the request id and nothing else.
    InternalError = ("INTERNAL_ERROR", 500, CallOperator),
    /// This instance is shutting down; another one answers.
    CoordinatorTerminating = ("COORDINATOR_TERMINATING", 503, Retry),
    /// Another instance held the group's mutex for too long.
    MutexUnavailable = ("COORDINATOR_STATE_MUTEX_UNAVAILABLE", 503, Retry),
    /// The group's queue is full.
    CoordinatorOverloaded = ("COORDINATOR_OVERLOADED", 503, Retry),
    /// Redis did not answer, or refused to write.
    RedisUnavailable = ("REDIS_UNAVAILABLE", 503, Retry),
    /// A shard's stream or consumer group could not be created.
    ProvisioningFailed = ("REDIS_STREAM_PROVISIONING_FAILED", 503, CallOperator),
    /// The group's key is gone without having been deleted through the API.
    GroupMetadataMissing = ("GROUP_METADATA_MISSING", 503, CallOperator),
    /// The group's record cannot be read; it is never overwritten.
    GroupMetadataCorrupt = ("GROUP_METADATA_CORRUPT", 503, CallOperator),
}

impl ErrorCode {
    /// Seconds for the `Retry-After` header; `None` for codes that retrying does not help.
    #[must_use]
    pub fn retry_after_seconds(self) -> Option<u32> {
        match self.http_status() {
            429 | 503 => Some(match self.client_action() {
                ClientAction::CallOperator => 5,
                _ => 1,
            }),
            _ => None,
        }
    }

    /// The HTTP reason in upper snake case, as it stands in the body's `status`.
    #[must_use]
    pub fn status_text(self) -> &'static str {
        match self.http_status() {
            400 => "BAD_REQUEST",
            401 => "UNAUTHORIZED",
            403 => "FORBIDDEN",
            404 => "NOT_FOUND",
            405 => "METHOD_NOT_ALLOWED",
            409 => "CONFLICT",
            413 => "PAYLOAD_TOO_LARGE",
            415 => "UNSUPPORTED_MEDIA_TYPE",
            422 => "UNPROCESSABLE_ENTITY",
            429 => "TOO_MANY_REQUESTS",
            503 => "SERVICE_UNAVAILABLE",
            _ => "INTERNAL_SERVER_ERROR",
        }
    }
}

/// The body of every error answer (protocol 8).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ErrorBody {
    /// The HTTP reason in upper snake case, e.g. `CONFLICT`.
    pub status: String,
    /// The code to act upon.
    pub error_code: ErrorCode,
    /// What happened, to what, and what to do, for people.
    pub message: String,
}

impl ErrorBody {
    /// A body for `code` with a sentence for people.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        ErrorBody { status: code.status_text().to_owned(), error_code: code, message: message.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_serialise_as_written() {
        let mut seen = std::collections::BTreeSet::new();
        for code in ErrorCode::ALL {
            assert!(seen.insert(code.as_str()), "{code:?} twice");
            assert_eq!(serde_json::to_string(code).unwrap(), format!("\"{}\"", code.as_str()));
        }
    }

    #[test]
    fn every_503_and_429_says_when_to_come_back() {
        for code in ErrorCode::ALL {
            assert_eq!(
                code.retry_after_seconds().is_some(),
                matches!(code.http_status(), 429 | 503),
                "{code:?}"
            );
        }
    }

    #[test]
    fn every_http_status_has_its_own_reason() {
        for code in ErrorCode::ALL {
            assert_eq!(code.http_status() == 500, code.status_text() == "INTERNAL_SERVER_ERROR", "{code:?}");
        }
    }

    #[test]
    fn body_has_the_shape_of_protocol_8() {
        let body = ErrorBody::new(ErrorCode::GroupAlreadyExists, "group orders:billing exists");
        assert_eq!(
            serde_json::to_string(&body).unwrap(),
            r#"{"status":"CONFLICT","errorCode":"GROUP_ALREADY_EXISTS","message":"group orders:billing exists"}"#
        );
    }
}
