// Before the page is drawn: the chosen scheme, or that of the system.
const chosenTheme = localStorage.getItem("theme");
if (chosenTheme === "light" || chosenTheme === "dark") document.documentElement.dataset.theme = chosenTheme;
