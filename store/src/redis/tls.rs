//! TLS to Redis (protocol 12, `redis.tls`).

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::redis::RedisError;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::{ClientConfig, Error, RootCertStore};

use super::dial::Endpoint;
use super::settings::SettingsError;
use crate::types::StoreError;

/// How servers are known, and what we show them. All files are PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsSettings {
    /// Certificates of the authorities that are trusted. Without it: those of the operating system.
    pub ca_file: Option<PathBuf>,
    /// Our own certificate with its chain, for servers that ask for one (`tls-auth-clients`).
    pub certificate_file: Option<PathBuf>,
    /// The key of that certificate.
    pub key_file: Option<PathBuf>,
    /// The name that servers' certificates must have. Without it: the host each is reached under.
    pub server_name: Option<String>,
}

/// Wraps sockets in TLS.
#[derive(Clone)]
pub(super) struct Tls {
    connector: TlsConnector,
    server_name: Option<ServerName<'static>>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Tls").field("server_name", &self.server_name).finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads the files.
    pub(super) fn new(settings: &TlsSettings) -> Result<Self, SettingsError> {
        let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| SettingsError::Tls("redis.tls", error.to_string()))?
            .with_root_certificates(roots(settings.ca_file.as_deref())?);
        let config = match (&settings.certificate_file, &settings.key_file) {
            (None, None) => builder.with_no_client_auth(),
            (Some(certificate), Some(key)) => {
                let chain = certificates("redis.tls.certificate-file", certificate)?;
                let key = PrivateKeyDer::from_pem_file(key).map_err(|error| {
                    SettingsError::Tls("redis.tls.key-file", format!("{}: {error}", key.display()))
                })?;
                builder
                    .with_client_auth_cert(chain, key)
                    .map_err(|error| SettingsError::Tls("redis.tls.certificate-file", error.to_string()))?
            }
            (Some(_), None) => {
                return Err(SettingsError::Tls(
                    "redis.tls.certificate-file",
                    "needs redis.tls.key-file".into(),
                ));
            }
            (None, Some(_)) => {
                return Err(SettingsError::Tls(
                    "redis.tls.key-file",
                    "needs redis.tls.certificate-file".into(),
                ));
            }
        };
        let server_name =
            settings.server_name.clone().map(ServerName::try_from).transpose().map_err(|_| {
                SettingsError::Tls("redis.tls.server-name", "is neither a host name nor an IP address".into())
            })?;
        Ok(Tls { connector: TlsConnector::from(Arc::new(config)), server_name })
    }

    /// Shakes hands over `socket`. A certificate that is not accepted, on either side, is a fault of the
    /// configuration; what else goes wrong may pass.
    pub(super) async fn wrap(
        &self,
        host: &str,
        socket: TcpStream,
        to: &Endpoint,
    ) -> Result<TlsStream<TcpStream>, StoreError> {
        let name = match &self.server_name {
            Some(name) => name.clone(),
            None => ServerName::try_from(host.to_owned()).map_err(|_| {
                StoreError::Misconfigured(format!(
                    "TLS to {to}: {host:?} is no name that a certificate can have"
                ))
            })?,
        };
        self.connector.connect(name, socket).await.map_err(|error| failed(&error, to))
    }
}

/// What a failed handshake means.
fn failed(error: &io::Error, to: &Endpoint) -> StoreError {
    match cause(error) {
        Some(cause) => refused(cause, to),
        None => StoreError::Unavailable(format!("cannot connect: TLS: {error} ({to})")),
    }
}

/// What TLS has to do with an error on a connection that was made: a server of TLS 1.3 refuses our certificate only when it
/// is first read from. `None`: nothing.
pub(super) fn behind(error: &RedisError, to: &Endpoint) -> Option<StoreError> {
    // redis-rs passes the driver's error on as a copy of its text, which is rustls' own.
    let text = error.to_string();
    let (_, alert) = text.split_once("received fatal alert: ")?;
    let alert = alert.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default();
    Some(alerted(alert, to))
}

fn alerted(alert: &str, to: &Endpoint) -> StoreError {
    StoreError::Misconfigured(format!(
        "TLS to {to}: the server refuses ({alert}): see redis.tls.certificate-file and redis.tls.key-file"
    ))
}

fn cause(error: &io::Error) -> Option<&Error> {
    error.get_ref().and_then(|cause| cause.downcast_ref::<Error>())
}

fn refused(cause: &Error, to: &Endpoint) -> StoreError {
    StoreError::Misconfigured(match cause {
        Error::AlertReceived(alert) => return alerted(&format!("{alert:?}"), to),
        Error::InvalidCertificate(why) => format!(
            "TLS to {to}: its certificate is not accepted ({why}): see redis.tls.ca-file and redis.tls.server-name"
        ),
        why => format!(
            "TLS to {to}: {why}: does it speak TLS on this port? Without TLS the URL begins with redis://"
        ),
    })
}

fn roots(ca_file: Option<&Path>) -> Result<RootCertStore, SettingsError> {
    let mut roots = RootCertStore::empty();
    match ca_file {
        Some(path) => {
            for certificate in certificates("redis.tls.ca-file", path)? {
                roots.add(certificate).map_err(|error| {
                    SettingsError::Tls("redis.tls.ca-file", format!("{}: {error}", path.display()))
                })?;
            }
        }
        None => {
            let found = rustls_native_certs::load_native_certs();
            let (added, _) = roots.add_parsable_certificates(found.certs);
            if added == 0 {
                return Err(SettingsError::Tls(
                    "redis.tls.ca-file",
                    "is not set, and the operating system has no trusted certificates".into(),
                ));
            }
        }
    }
    Ok(roots)
}

fn certificates(key: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, SettingsError> {
    let problem = |error: String| SettingsError::Tls(key, format!("{}: {error}", path.display()));
    let certificates = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| problem(error.to_string()))?;
    if certificates.is_empty() {
        return Err(problem("holds no certificate".to_owned()));
    }
    Ok(certificates)
}
