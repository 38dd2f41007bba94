//! Code generated from `proto/`, and nothing else.

/// The kubelet's plugin registration interface.
pub mod registration {
    #![allow(clippy::allow_attributes, missing_docs, unreachable_pub, unused_qualifications, reason = "generated code")]
    tonic::include_proto!("pluginregistration");
}

/// The Container Storage Interface: its Identity and Node services.
pub mod csi {
    #![allow(clippy::allow_attributes, missing_docs, unreachable_pub, unused_qualifications, reason = "generated code")]
    tonic::include_proto!("csi.v1");
}
