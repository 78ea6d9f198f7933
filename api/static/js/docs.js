/** Entry of the OpenAPI page. */

window.SwaggerUIBundle({ url: "/openapi.json", dom_id: "#docs", validatorUrl: null });
