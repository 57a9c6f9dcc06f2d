//! Every route, by name. What is not in this table is answered 404, another method 405 with `Allow`.

use actix_web::web::{self, ServiceConfig};
use actix_web::{FromRequest, Handler, HttpRequest, Resource, Responder};

use super::error::ApiError;
use super::{groups, heartbeat, migrations, monitoring, probes, producer_routing, stream_reads};

/// The label of requests that no route takes.
pub(super) const UNKNOWN: &str = "unknown";
/// The route that is called all the time.
pub(super) const HEARTBEAT: &str = "heartbeat";

/// Names as segments: empty ones too, so that they are refused as names and not as routes.
const STREAM: &str = "/coord/v1/streams/{p:[^/]*}";
const GROUP: &str = "/coord/v1/streams/{p:[^/]*}/groups/{g:[^/]*}";
const MONITORED: &str = "/coord/v1/monitoring/streams/{p:[^/]*}/groups/{g:[^/]*}";

/// Adds every route to an application.
pub(super) fn configure(config: &mut ServiceConfig) {
    config
        .service(read("livez", "/livez", probes::livez))
        .service(read("readyz", "/readyz", probes::readyz))
        .service(read("metrics", "/metrics", probes::metrics))
        .service(only_post("create_stream", STREAM, groups::create_stream))
        .service(only_post("scale_stream", &format!("{STREAM}/scale"), migrations::scale_stream))
        .service(only_post("scale_group", &format!("{GROUP}/scale"), migrations::scale_group))
        .service(read("migration", &format!("{GROUP}/migrations/{{id:[^/]*}}"), migrations::read))
        .service(only_post(
            "roll_back",
            &format!("{GROUP}/migrations/{{id:[^/]*}}/rollback"),
            migrations::roll_back,
        ))
        .service(
            resource("group", GROUP, "GET, HEAD, POST, DELETE")
                .route(web::get().to(groups::read))
                .route(web::head().to(groups::read))
                .route(web::post().to(groups::create))
                .route(web::delete().to(groups::delete)),
        )
        .service(read("producer_routing", &format!("{GROUP}/producer-routing"), producer_routing::read))
        .service(only_post(
            HEARTBEAT,
            &format!("{GROUP}/members/{{m:[^/]*}}/heartbeat"),
            heartbeat::heartbeat,
        ))
        .service(read("health", "/coord/v1/monitoring/health", monitoring::health))
        .service(read("groups", "/coord/v1/monitoring/groups", monitoring::groups))
        .service(read("group_summary", MONITORED, monitoring::summary))
        .service(read("members", &format!("{MONITORED}/members"), monitoring::members))
        .service(read("assignments", &format!("{MONITORED}/assignments"), monitoring::assignments))
        .service(read("migrations", &format!("{MONITORED}/migrations"), migrations::list))
        .service(read(
            "monitored_migration",
            &format!("{MONITORED}/migrations/{{id:[^/]*}}"),
            migrations::read,
        ))
        .service(read("offsets", &format!("{MONITORED}/offsets"), stream_reads::offsets))
        .service(read("consumption", &format!("{MONITORED}/consumption"), stream_reads::consumption))
        .service(read(
            "messages",
            &format!("{MONITORED}/shards/{{i:[^/]*}}/messages"),
            stream_reads::messages,
        ))
        .service(read("history", &format!("{MONITORED}/history"), stream_reads::history))
        .service(read("actor", &format!("{MONITORED}/actor"), monitoring::actor))
        .default_service(web::to(no_route));
}

/// The name of a route, kept where its requests can find it.
struct RouteName(&'static str);

/// The name of the route that took the request, for metrics: never a path, which clients make up.
pub(super) fn name_of(request: &HttpRequest) -> &'static str {
    request.app_data::<RouteName>().map_or(UNKNOWN, |name| name.0)
}

fn resource(name: &'static str, pattern: &str, allow: &'static str) -> Resource {
    let other_methods = move || async move { Err::<String, _>(ApiError::method_not_allowed(allow)) };
    web::resource(pattern).app_data(RouteName(name)).default_service(web::to(other_methods))
}

fn read<F, Arguments>(name: &'static str, pattern: &str, handler: F) -> Resource
where
    F: Handler<Arguments>,
    Arguments: FromRequest + 'static,
    F::Output: Responder + 'static,
{
    resource(name, pattern, "GET, HEAD").route(web::get().to(handler.clone())).route(web::head().to(handler))
}

fn only_post<F, Arguments>(name: &'static str, pattern: &str, handler: F) -> Resource
where
    F: Handler<Arguments>,
    Arguments: FromRequest + 'static,
    F::Output: Responder + 'static,
{
    resource(name, pattern, "POST").route(web::post().to(handler))
}

async fn no_route() -> Result<String, ApiError> {
    Err(ApiError::no_route())
}
