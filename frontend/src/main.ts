import { mount } from "svelte";
import App from "./App.svelte";
import "./app.css";

const target = document.getElementById("app")!;
target.replaceChildren(); // the page's head, which stood there for the time until now
mount(App, { target });
