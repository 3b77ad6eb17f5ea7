// The token comes from the form, or from behind "#" in the address, which no browser sends to a server.
const form = document.getElementById("form");
const field = document.getElementById("token");
const said = document.getElementById("said");

async function give(token) {
  const answer = await fetch("/login", { method: "POST", body: token, headers: { "content-type": "text/plain" } });
  if (answer.ok) location.replace("/");
  else said.textContent = await answer.text();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  give(field.value.trim());
});
const found = new URLSearchParams(location.hash.slice(1)).get("token");
if (found) {
  history.replaceState(null, "", "/");
  give(found);
}
