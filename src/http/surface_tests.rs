//! The middleware and the route table, without a network.

use actix_web::body::to_bytes;
use actix_web::dev::Service;
use actix_web::http::{Method, StatusCode};
use actix_web::middleware::from_fn;
use actix_web::test::{TestRequest, init_service};
use actix_web::{App, HttpResponse, web};
use rsc_protocol::{ErrorBody, ErrorCode};

use super::error::ApiError;
use super::observe::observe;
use super::request_id::X_REQUEST_ID;
use super::routes;

async fn panics_at_once() -> HttpResponse {
    panic!("secret of src/somewhere.rs")
}

async fn panics_later() -> HttpResponse {
    tokio::task::yield_now().await;
    let text = String::from("formatted secret");
    panic!("{text}")
}

async fn panics_oddly() -> HttpResponse {
    std::panic::panic_any(17_u8)
}

async fn fails() -> Result<String, ApiError> {
    Err(ApiError::new(ErrorCode::InternalError, "secret cause"))
}

async fn body_of(answer: HttpResponse) -> ErrorBody {
    serde_json::from_slice(&to_bytes(answer.into_body()).await.unwrap()).unwrap()
}

#[actix_web::test]
async fn a_panic_is_a_500_with_the_request_id_and_harms_nobody_else() {
    let app = App::new()
        .wrap(from_fn(observe))
        .route("/at-once", web::get().to(panics_at_once))
        .route("/later", web::get().to(panics_later))
        .route("/oddly", web::get().to(panics_oddly))
        .route("/fails", web::get().to(fails))
        .route("/fine", web::get().to(|| async { "fine" }));
    let app = init_service(app).await;
    for path in ["/at-once", "/later", "/oddly", "/fails"] {
        let request = TestRequest::get().uri(path).insert_header((X_REQUEST_ID, "req-17")).to_request();
        let answer = match app.call(request).await {
            Ok(answer) => answer.into_parts().1,
            Err(error) => error.error_response(),
        };
        assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR, "{path}");
        assert_eq!(answer.headers().get(X_REQUEST_ID).unwrap(), "req-17", "{path}");
        let body = body_of(answer).await;
        assert_eq!(body.error_code, ErrorCode::InternalError, "{path}");
        assert!(
            body.message.contains("req-17") && !body.message.contains("secret"),
            "{path}: {}",
            body.message
        );

        let fine = app.call(TestRequest::get().uri("/fine").to_request()).await.unwrap();
        assert_eq!(fine.status(), StatusCode::OK, "after {path}");
        assert!(fine.headers().contains_key(X_REQUEST_ID));
    }
}

#[actix_web::test]
async fn every_route_knows_its_methods() {
    let app = init_service(App::new().wrap(from_fn(observe)).configure(routes::configure)).await;
    let root = "/coord/v1";
    for (path, methods) in [
        ("/livez".to_owned(), "GET, HEAD"),
        ("/readyz".to_owned(), "GET, HEAD"),
        ("/metrics".to_owned(), "GET, HEAD"),
        (format!("{root}/streams/p"), "POST"),
        (format!("{root}/streams/"), "POST"),
        (format!("{root}/streams/p/scale"), "POST"),
        (format!("{root}/streams/p/groups/g/scale"), "POST"),
        (format!("{root}/streams/p/groups/g/migrations/x"), "GET, HEAD"),
        (format!("{root}/streams/p/groups/g/migrations/x/rollback"), "POST"),
        (format!("{root}/monitoring/streams/p/groups/g/migrations"), "GET, HEAD"),
        (format!("{root}/monitoring/streams/p/groups/g/migrations/x"), "GET, HEAD"),
        (format!("{root}/streams/p/groups/g"), "GET, HEAD, POST, DELETE"),
        (format!("{root}/streams//groups/"), "GET, HEAD, POST, DELETE"),
        (format!("{root}/streams/p/groups/g/producer-routing"), "GET, HEAD"),
        (format!("{root}/streams/p/groups/g/members/m/heartbeat"), "POST"),
        (format!("{root}/monitoring/health"), "GET, HEAD"),
        (format!("{root}/monitoring/groups"), "GET, HEAD"),
        (format!("{root}/monitoring/streams/p/groups/g"), "GET, HEAD"),
        (format!("{root}/monitoring/streams/p/groups/g/members"), "GET, HEAD"),
        (format!("{root}/monitoring/streams/p/groups/g/assignments"), "GET, HEAD"),
        (format!("{root}/monitoring/streams/p/groups/g/actor"), "GET, HEAD"),
        (format!("{root}/monitoring/streams/p/groups/g/offsets"), "GET, HEAD"),
        (format!("{root}/monitoring/streams/p/groups/g/consumption"), "GET, HEAD"),
        (format!("{root}/monitoring/streams/p/groups/g/shards/0/messages"), "GET, HEAD"),
        (format!("{root}/monitoring/streams/p/groups/g/shards//messages"), "GET, HEAD"),
        (format!("{root}/monitoring/streams/p/groups/g/history"), "GET, HEAD"),
    ] {
        let others = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"];
        for other in others.into_iter().filter(|other| !methods.split(", ").any(|method| method == *other)) {
            let method = Method::from_bytes(other.as_bytes()).unwrap();
            let request = TestRequest::with_uri(&path).method(method.clone()).to_request();
            let answer = app.call(request).await.unwrap();
            assert_eq!(answer.status(), StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
            assert_eq!(answer.headers().get("allow").unwrap(), methods, "{method} {path}");
            assert_ne!(routes::name_of(answer.request()), routes::UNKNOWN, "{path}");
        }
    }
}

#[actix_web::test]
async fn what_is_no_route_is_not_found() {
    let app = init_service(App::new().wrap(from_fn(observe)).configure(routes::configure)).await;
    for path in [
        "/",
        "/livez/",
        "//livez",
        "/coord/v1",
        "/coord/v1/streams",
        "/coord/v1/streams/p/",
        "/coord/v1/streams/p/groups",
        "/coord/v1/streams/p/groups/g/",
        "/coord/v1/streams/a/b/groups/g",
        "/coord/v1/streams/p/shrink",
        "/coord/v1/streams/p/groups/g/members/m",
        "/coord/v1/auth/login",
        "/coord/v1/monitoring/session",
        "/coord/v2/monitoring/health",
        "/openapi.json",
        "/console",
    ] {
        for method in [Method::GET, Method::POST, Method::DELETE] {
            let request = TestRequest::with_uri(path).method(method.clone()).to_request();
            let answer = app.call(request).await.unwrap();
            assert_eq!(answer.status(), StatusCode::NOT_FOUND, "{method} {path}");
            assert_eq!(routes::name_of(answer.request()), routes::UNKNOWN, "{path}");
            let body = body_of(answer.into_parts().1).await;
            assert_eq!((body.status.as_str(), body.error_code), ("NOT_FOUND", ErrorCode::NotFound), "{path}");
        }
    }
}
